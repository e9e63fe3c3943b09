// What the CPU kernels share: tensors behind torch's stable C interface, tasks in parallel, errors as codes.

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

// Each file has its own copy of what is here; none is seen from outside of it.
namespace aotpack {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kRowBytes = kBlock / 8;  // of one row of a tile

[[maybe_unused]] void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error("aotpack: a torch call failed");
}

[[maybe_unused]] void require(bool condition, const char* message) {
  if (!condition) throw std::runtime_error(message);
}

struct Handle {
  AtenTensorHandle value = nullptr;
  explicit Handle(AtenTensorHandle v) : value(v) {}
  Handle(Handle&& other) noexcept : value(std::exchange(other.value, nullptr)) {}
  Handle(const Handle&) = delete;
  ~Handle() {
    if (value) aoti_torch_delete_tensor_object(value);
  }
};

struct View {
  void* data;
  int64_t sizes[4];
  int32_t dtype;
  View(AtenTensorHandle tensor, int64_t dim) {
    int64_t found;
    int64_t* found_sizes;
    check(aoti_torch_get_dim(tensor, &found));
    require(found == dim, "aotpack: a tensor has the wrong number of dimensions");
    check(aoti_torch_get_sizes(tensor, &found_sizes));
    std::copy(found_sizes, found_sizes + dim, sizes);
    check(aoti_torch_get_data_ptr(tensor, &data));
    check(aoti_torch_get_dtype(tensor, &dtype));
  }
  template <typename T>
  T* as() const { return static_cast<T*>(data); }
};

[[maybe_unused]] Handle empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes.begin()[i];
  }
  AtenTensorHandle handle;
  check(aoti_torch_empty_strided(
      sizes.size(), sizes.begin(), strides.data(), dtype, aoti_torch_device_type_cpu(), 0, &handle));
  return Handle(handle);
}

// Calls work(task, scratch) for every task; workers take tasks in turn because their costs differ.
template <typename MakeScratch, typename Work>
void for_each_task(int64_t tasks, const MakeScratch& make_scratch, const Work& work) {
  struct Context {
    const MakeScratch& make;
    const Work& work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
  } context{make_scratch, work, tasks};
  auto worker = [](int64_t begin, int64_t end, void* pointer) {
    auto& c = *static_cast<Context*>(pointer);
    try {
      auto scratch = c.make();
      for (int64_t task; !c.failed && (task = c.next++) < c.tasks;) c.work(task, *scratch);
    } catch (...) {
      c.failed = true;
    }
  };
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads));
  // With several threads a parallel region is opened even for one task: inside it the matrix library stays
  // on one thread, which keeps results equal whatever the thread count.
  check(torch_parallel_for(0, threads, 1, worker, &context));
  require(!context.failed, "aotpack: a worker failed; the block mask or the tensors do not fit");
}

template <typename Function>
AOTITorchError guarded(const Function& function) {
  try {
    function();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return AOTI_TORCH_FAILURE;
  }
}

}  // namespace
}  // namespace aotpack
