// Block-sparse attention for the CPU: online-softmax forward and two-pass backward over the visible
// 128x128 blocks of a block mask. Matrix products are torch's own (mm, addmm), so they run on the widest
// units the machine has, whatever instruction set this file is compiled for.
//
// Shapes: q, out, dq [B,H,Q,D]; k, dk [B,Hk,KV,D]; v, dv [B,Hk,KV,Dv]; lse, grad_lse [B,H,Q] float32;
// index tensors as in torch's BlockMask, int32, [Bm,1,rows] and [Bm,1,rows,columns], Bm 1 or B;
// tiles [P,128,16] uint8: the cells of the partial blocks, one bit each, column j in bit j % 8 (from the least
// significant) of byte j / 8; tile_ids [Bm,1,Qblocks,KVblocks] int32.
// All tensors are contiguous. Every loop order is fixed, so results do not depend on the thread count.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "common.h"

using namespace aotpack;

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kHeadsAtOnce = 8;
// Rows summed by one matrix product. MKL splits longer sums (768 and more, seen) by the thread count, and its
// results then depend on it.
constexpr int64_t kSumRows = 2 * kBlock;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
static_assert(kBlock % Vec::size() == 0);
static_assert(std::endian::native == std::endian::little, "hide() reads 32 bits of a tile at once");

// A row-major float32 matrix over scratch memory; `transposed` is the same memory seen as [columns, rows].
Handle matrix(float* data, int64_t rows, int64_t columns, bool transposed = false) {
  const int64_t sizes[] = {transposed ? columns : rows, transposed ? rows : columns};
  const int64_t strides[] = {transposed ? 1 : columns, transposed ? columns : 1};
  AtenTensorHandle handle;
  check(aoti_torch_create_tensor_from_blob(
      data, 2, sizes, strides, 0, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle));
  return Handle(handle);
}

void multiply(const Handle& out, const Handle& a, const Handle& b) {
  check(aoti_torch_cpu_mm_out(out.value, a.value, b.value));
}

void multiply_add(const Handle& out, const Handle& a, const Handle& b) {
  check(aoti_torch_cpu_addmm_out(out.value, out.value, a.value, b.value, 1.0, 1.0));
}

struct Buffer {
  // 64-byte alignment: the matrix library's results may depend on alignment, and ours must not vary.
  float* data;
  explicit Buffer(int64_t count)
      : data(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64))) {
    require(data != nullptr, "aotpack: out of memory for a scratch buffer");
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
};

// The visible blocks of one row (or one column) of the block grid: first the partial ones, then the full.
struct Line {
  const int32_t *partial, *full;
  int32_t partial_count, full_count;
  int32_t count() const { return partial_count + full_count; }
  int32_t block(int32_t i) const { return i < partial_count ? partial[i] : full[i - partial_count]; }
  bool is_partial(int32_t i) const { return i < partial_count; }
};

struct Lines {
  View num, idx, full_num, full_idx;
  Lines(AtenTensorHandle n, AtenTensorHandle i, AtenTensorHandle fn, AtenTensorHandle fi)
      : num(n, 3), idx(i, 4), full_num(fn, 3), full_idx(fi, 4) {
    require(std::equal(num.sizes, num.sizes + 3, full_num.sizes) && std::equal(num.sizes, num.sizes + 3, idx.sizes) &&
                std::equal(idx.sizes, idx.sizes + 4, full_idx.sizes),
            "aotpack: the block lists do not fit each other");
  }
  int64_t batch() const { return num.sizes[0]; }
  int64_t rows() const { return num.sizes[2]; }
  int64_t columns() const { return idx.sizes[3]; }
  Line line(int64_t b, int64_t row) const {
    const int64_t at = (b % batch()) * rows() + row;
    const Line line{idx.as<int32_t>() + at * columns(), full_idx.as<int32_t>() + at * columns(),
                    num.as<int32_t>()[at], full_num.as<int32_t>()[at]};
    require(0 <= line.partial_count && line.partial_count <= columns() && 0 <= line.full_count &&
                line.full_count <= columns(),
            "aotpack: a block list is longer than its row");
    return line;
  }
};

struct Tiles {
  View cells, ids;
  Tiles(AtenTensorHandle cells_, AtenTensorHandle ids_) : cells(cells_, 3), ids(ids_, 4) {
    require(cells.dtype == aoti_torch_dtype_uint8() && cells.sizes[1] == kBlock && cells.sizes[2] == kRowBytes,
            "aotpack: the block mask's tiles are not bits, uint8 [P,128,16]");
  }
  const uint8_t* tile(int64_t b, int64_t q_block, int64_t kv_block) const {
    const int64_t at = ((b % ids.sizes[0]) * ids.sizes[2] + q_block) * ids.sizes[3] + kv_block;
    const int32_t id = ids.as<int32_t>()[at];
    require(0 <= id && id < cells.sizes[0], "aotpack: a block mask names a tile that it does not have");
    return cells.as<uint8_t>() + id * kBlock * kRowBytes;
  }
};

struct Shape {
  int64_t B, H, Q, D, Hk, KV, Dv;
  int64_t group, q_blocks, kv_blocks, chunk, chunks;
  Shape(const View& q, const View& k, const View& v)
      : B(q.sizes[0]), H(q.sizes[1]), Q(q.sizes[2]), D(q.sizes[3]), Hk(k.sizes[1]), KV(k.sizes[2]),
        Dv(v.sizes[3]), group(H / Hk), q_blocks((Q + kBlock - 1) / kBlock),
        kv_blocks((KV + kBlock - 1) / kBlock), chunk(std::min(group, kHeadsAtOnce)),
        chunks((group + chunk - 1) / chunk) {
    require(k.sizes[0] == B && v.sizes[0] == B && v.sizes[1] == Hk && v.sizes[2] == KV && k.sizes[3] == D,
            "aotpack: q, k and v do not fit each other");
  }
  int64_t heads_in(int64_t c) const { return std::min(chunk, group - c * chunk); }
  void check_mask(const Lines& by_q, const Tiles& tiles) const {
    require((by_q.batch() == 1 || by_q.batch() == B) && by_q.rows() == q_blocks && by_q.columns() == kv_blocks &&
                tiles.ids.sizes[2] == q_blocks && tiles.ids.sizes[3] == kv_blocks &&
                (tiles.ids.sizes[0] == 1 || tiles.ids.sizes[0] == B),
            "aotpack: the block mask was built for other lengths");
  }
};

// Copies `rows` rows of `width` elements, times `factor`, into a float32 tile of kBlock rows; the rest is 0.
template <typename T>
void load(float* tile, const T* source, int64_t rows, int64_t width, float factor = 1.0f) {
  const int64_t count = rows * width;
  if (factor == 1.0f)
    for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<float>(source[i]);
  else
    for (int64_t i = 0; i < count; ++i) tile[i] = static_cast<float>(source[i]) * factor;
  std::fill(tile + count, tile + kBlock * width, 0.0f);
}

template <typename T>
void store(T* target, const float* tile, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<T>(tile[i]);
}

// Sets invisible cells of one row of scores to -inf; `visible` is that row of a tile, or null.
void hide(float* scores, const uint8_t* visible, int64_t columns) {
  if (visible)
    for (int64_t first = 0; first < kBlock; first += 32) {
      uint32_t bits;
      std::memcpy(&bits, visible + first / 8, sizeof(bits));
      for (uint32_t j = 0; j < 32; ++j) scores[first + j] = bits >> j & 1 ? scores[first + j] : -kInfinity;
    }
  std::fill(scores + columns, scores + kBlock, -kInfinity);
}

// One row of the online softmax: scores become exp(scores - max), and the running values are updated.
// Returns the factor by which what was accumulated before must shrink.
float online_softmax(float* scores, float& running_max, float& running_sum) {
  Vec top(running_max);
  for (int64_t j = 0; j < kBlock; j += Vec::size()) top = at::vec::maximum(top, Vec::loadu(scores + j));
  const float maximum = at::vec::vec_reduce_all<float>(
      [](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, top);
  if (maximum == -kInfinity) {
    std::fill(scores, scores + kBlock, 0.0f);
    return 1.0f;
  }
  Vec sum(0.0f);
  for (int64_t j = 0; j < kBlock; j += Vec::size()) {
    const Vec p = (Vec::loadu(scores + j) - Vec(maximum)).exp_u20();
    p.store(scores + j);
    sum = sum + p;
  }
  const float shrink = running_max == -kInfinity ? 0.0f : std::exp(running_max - maximum);
  running_sum = running_sum * shrink +
      at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
  running_max = maximum;
  return shrink;
}

void scale_row(float* row, int64_t width, float factor) {
  for (int64_t i = 0; i < width; ++i) row[i] *= factor;
}

// Scores become probabilities, and grad_p (d loss / d probability) becomes d loss / d score.
void softmax_gradient(float* scores, float* grad_p, float lse, float delta) {
  for (int64_t j = 0; j < kBlock; j += Vec::size()) {
    const Vec p = (Vec::loadu(scores + j) - Vec(lse)).exp_u20();
    p.store(scores + j);
    (p * (Vec::loadu(grad_p + j) - Vec(delta))).store(grad_p + j);
  }
}

struct ForwardScratch {
  Buffer q, k, v, scores, acc, top, sum;
  ForwardScratch(const Shape& s, int64_t rows)
      : q(rows * s.D), k(kBlock * s.D), v(kBlock * s.Dv), scores(rows * kBlock), acc(rows * s.Dv), top(rows),
        sum(rows) {}
};

template <typename T>
void forward(const Shape& s, const View& q, const View& k, const View& v, const Lines& by_q, const Tiles& tiles,
             float scale, T* out, float* lse) {
  auto make = [&] { return std::make_unique<ForwardScratch>(s, s.chunk * kBlock); };
  auto work = [&](int64_t task, ForwardScratch& m) {
    const int64_t q_block = task % s.q_blocks, c = task / s.q_blocks % s.chunks;
    const int64_t hk = task / s.q_blocks / s.chunks % s.Hk, b = task / s.q_blocks / s.chunks / s.Hk;
    const int64_t heads = s.heads_in(c), rows = heads * kBlock, first = q_block * kBlock;
    const int64_t q_rows = std::min(kBlock, s.Q - first), head0 = hk * s.group + c * s.chunk;
    auto q_row = [&](int64_t h) { return (b * s.H + head0 + h) * s.Q + first; };
    for (int64_t h = 0; h < heads; ++h)
      load(m.q.data + h * kBlock * s.D, q.as<T>() + q_row(h) * s.D, q_rows, s.D, scale);
    std::fill(m.acc.data, m.acc.data + rows * s.Dv, 0.0f);
    std::fill(m.top.data, m.top.data + rows, -kInfinity);
    std::fill(m.sum.data, m.sum.data + rows, 0.0f);
    const Handle mq = matrix(m.q.data, rows, s.D), mk = matrix(m.k.data, kBlock, s.D, true);
    const Handle mv = matrix(m.v.data, kBlock, s.Dv), mp = matrix(m.scores.data, rows, kBlock);
    const Handle acc = matrix(m.acc.data, rows, s.Dv);
    const Line line = by_q.line(b, q_block);
    for (int32_t i = 0; i < line.count(); ++i) {
      const int64_t kv_block = line.block(i), at = (b * s.Hk + hk) * s.KV + kv_block * kBlock;
      require(0 <= kv_block && kv_block < s.kv_blocks, "aotpack: a block index is out of range");
      const int64_t columns = std::min(kBlock, s.KV - kv_block * kBlock);
      load(m.k.data, k.as<T>() + at * s.D, columns, s.D);
      load(m.v.data, v.as<T>() + at * s.Dv, columns, s.Dv);
      multiply(mp, mq, mk);
      const uint8_t* tile = line.is_partial(i) ? tiles.tile(b, q_block, kv_block) : nullptr;
      for (int64_t r = 0; r < rows; ++r) {
        float* scores = m.scores.data + r * kBlock;
        hide(scores, tile ? tile + r % kBlock * kRowBytes : nullptr, columns);
        const float shrink = online_softmax(scores, m.top.data[r], m.sum.data[r]);
        if (shrink != 1.0f) scale_row(m.acc.data + r * s.Dv, s.Dv, shrink);
      }
      multiply_add(acc, mp, mv);
    }
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < q_rows; ++r) {
        const int64_t at = h * kBlock + r;
        const float sum = m.sum.data[at];
        scale_row(m.acc.data + at * s.Dv, s.Dv, sum > 0.0f ? 1.0f / sum : 0.0f);
        store(out + (q_row(h) + r) * s.Dv, m.acc.data + at * s.Dv, s.Dv);
        lse[q_row(h) + r] = sum > 0.0f ? m.top.data[at] + std::log(sum) : -kInfinity;
      }
  };
  for_each_task(s.B * s.Hk * s.chunks * s.q_blocks, make, work);
}

template <typename T>
struct Backward {
  const Shape& s;
  const View &grad_out, &q, &k, &v, &out;
  const float *lse, *grad_lse;
  const Lines &by_q, &by_kv;
  const Tiles& tiles;
  float scale;
  T *dq, *dk, *dv;
  float* deltas;  // [B,H,Q]: written by query_task, read by key_task

  struct Scratch {
    Buffer q, k, v, grad, scores, grad_p, lse, delta, dq, dk, dv;
    Scratch(const Shape& s, int64_t rows)
        : q(rows * s.D), k(kBlock * s.D), v(kBlock * s.Dv), grad(rows * s.Dv), scores(rows * kBlock),
          grad_p(rows * kBlock), lse(rows), delta(rows), dq(rows * s.D), dk(kBlock * s.D), dv(kBlock * s.Dv) {}
  };

  int64_t q_row(int64_t b, int64_t head, int64_t first) const { return (b * s.H + head) * s.Q + first; }

  // q (scaled), grad_out, lse and delta = sum(grad_out * out) - grad_lse of `heads` heads of one query block.
  // An empty row gets lse +inf and delta 0, so its probabilities and gradients are 0.
  void load_rows(Scratch& m, int64_t b, int64_t head0, int64_t heads, int64_t q_block, bool first_pass) const {
    const int64_t first = q_block * kBlock, q_rows = std::min(kBlock, s.Q - first);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t at = q_row(b, head0 + h, first), to = h * kBlock;
      load(m.q.data + to * s.D, q.as<T>() + at * s.D, q_rows, s.D, scale);
      load(m.grad.data + to * s.Dv, grad_out.as<T>() + at * s.Dv, q_rows, s.Dv);
      for (int64_t r = 0; r < kBlock; ++r) {
        const bool empty = r >= q_rows || lse[at + r] == -kInfinity;
        m.lse.data[to + r] = empty ? kInfinity : lse[at + r];
        if (first_pass && r < q_rows)
          deltas[at + r] = empty ? 0.0f : delta(m.grad.data + (to + r) * s.Dv, at + r);
        m.delta.data[to + r] = r < q_rows ? deltas[at + r] : 0.0f;
      }
    }
  }

  float delta(const float* grad, int64_t row) const {
    const T* o = out.as<T>() + row * s.Dv;
    float sum = -grad_lse[row];
    for (int64_t i = 0; i < s.Dv; ++i) sum += grad[i] * static_cast<float>(o[i]);
    return sum;
  }

  void load_columns(Scratch& m, int64_t b, int64_t hk, int64_t kv_block) const {
    const int64_t columns = std::min(kBlock, s.KV - kv_block * kBlock);
    const int64_t at = (b * s.Hk + hk) * s.KV + kv_block * kBlock;
    load(m.k.data, k.as<T>() + at * s.D, columns, s.D);
    load(m.v.data, v.as<T>() + at * s.Dv, columns, s.Dv);
  }

  // Fills m.scores with probabilities and m.grad_p with d loss / d score for one block.
  void block(Scratch& m, int64_t b, int64_t rows, int64_t q_block, int64_t kv_block, bool partial) const {
    multiply(matrix(m.scores.data, rows, kBlock), matrix(m.q.data, rows, s.D), matrix(m.k.data, kBlock, s.D, true));
    multiply(matrix(m.grad_p.data, rows, kBlock), matrix(m.grad.data, rows, s.Dv),
             matrix(m.v.data, kBlock, s.Dv, true));
    const uint8_t* tile = partial ? tiles.tile(b, q_block, kv_block) : nullptr;
    const int64_t columns = std::min(kBlock, s.KV - kv_block * kBlock);
    for (int64_t r = 0; r < rows; ++r) {
      hide(m.scores.data + r * kBlock, tile ? tile + r % kBlock * kRowBytes : nullptr, columns);
      softmax_gradient(m.scores.data + r * kBlock, m.grad_p.data + r * kBlock, m.lse.data[r], m.delta.data[r]);
    }
  }

  void query_task(int64_t task, Scratch& m) const {
    const int64_t q_block = task % s.q_blocks, c = task / s.q_blocks % s.chunks;
    const int64_t hk = task / s.q_blocks / s.chunks % s.Hk, b = task / s.q_blocks / s.chunks / s.Hk;
    const int64_t heads = s.heads_in(c), rows = heads * kBlock, head0 = hk * s.group + c * s.chunk;
    const int64_t first = q_block * kBlock, q_rows = std::min(kBlock, s.Q - first);
    load_rows(m, b, head0, heads, q_block, true);
    std::fill(m.dq.data, m.dq.data + rows * s.D, 0.0f);
    const Handle acc = matrix(m.dq.data, rows, s.D), ds = matrix(m.grad_p.data, rows, kBlock);
    const Handle mk = matrix(m.k.data, kBlock, s.D);
    const Line line = by_q.line(b, q_block);
    for (int32_t i = 0; i < line.count(); ++i) {
      const int64_t kv_block = line.block(i);
      require(0 <= kv_block && kv_block < s.kv_blocks, "aotpack: a block index is out of range");
      load_columns(m, b, hk, kv_block);
      block(m, b, rows, q_block, kv_block, line.is_partial(i));
      multiply_add(acc, ds, mk);
    }
    scale_row(m.dq.data, rows * s.D, scale);
    for (int64_t h = 0; h < heads; ++h)
      store(dq + q_row(b, head0 + h, first) * s.D, m.dq.data + h * kBlock * s.D, q_rows * s.D);
  }

  void key_task(int64_t task, Scratch& m) const {
    const int64_t kv_block = task % s.kv_blocks, hk = task / s.kv_blocks % s.Hk, b = task / s.kv_blocks / s.Hk;
    load_columns(m, b, hk, kv_block);
    std::fill(m.dk.data, m.dk.data + kBlock * s.D, 0.0f);
    std::fill(m.dv.data, m.dv.data + kBlock * s.Dv, 0.0f);
    const Handle acc_k = matrix(m.dk.data, kBlock, s.D), acc_v = matrix(m.dv.data, kBlock, s.Dv);
    const Line line = by_kv.line(b, kv_block);
    for (int32_t i = 0; i < line.count(); ++i) {
      const int64_t q_block = line.block(i);
      require(0 <= q_block && q_block < s.q_blocks, "aotpack: a block index is out of range");
      for (int64_t c = 0; c < s.chunks; ++c) {
        const int64_t heads = s.heads_in(c), rows = heads * kBlock;
        load_rows(m, b, hk * s.group + c * s.chunk, heads, q_block, false);
        block(m, b, rows, q_block, kv_block, line.is_partial(i));
        for (int64_t r = 0; r < rows; r += kSumRows) {
          const int64_t n = std::min(kSumRows, rows - r);
          multiply_add(acc_v, matrix(m.scores.data + r * kBlock, n, kBlock, true), matrix(m.grad.data + r * s.Dv, n, s.Dv));
          multiply_add(acc_k, matrix(m.grad_p.data + r * kBlock, n, kBlock, true), matrix(m.q.data + r * s.D, n, s.D));
        }
      }
    }
    const int64_t columns = std::min(kBlock, s.KV - kv_block * kBlock);
    const int64_t at = (b * s.Hk + hk) * s.KV + kv_block * kBlock;
    store(dk + at * s.D, m.dk.data, columns * s.D);
    store(dv + at * s.Dv, m.dv.data, columns * s.Dv);
  }

  void run() const {
    auto make = [&] { return std::make_unique<Scratch>(s, s.chunk * kBlock); };
    for_each_task(s.B * s.Hk * s.chunks * s.q_blocks, make, [&](int64_t t, Scratch& m) { query_task(t, m); });
    for_each_task(s.B * s.Hk * s.kv_blocks, make, [&](int64_t t, Scratch& m) { key_task(t, m); });
  }
};

template <typename Function>
void for_dtype(int32_t dtype, const Function& function) {
  if (dtype == aoti_torch_dtype_float32()) return function(float());
  if (dtype == aoti_torch_dtype_bfloat16()) return function(c10::BFloat16());
  require(dtype == aoti_torch_dtype_float16(), "aotpack: q is not float32, bfloat16 or float16");
  function(c10::Half());
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_block_sparse_forward(
    AtenTensorHandle q_, AtenTensorHandle k_, AtenTensorHandle v_, AtenTensorHandle kv_num,
    AtenTensorHandle kv_idx, AtenTensorHandle full_kv_num, AtenTensorHandle full_kv_idx, AtenTensorHandle cells,
    AtenTensorHandle ids, double scale, AtenTensorHandle* out_, AtenTensorHandle* lse_) {
  return guarded([&] {
    const View q(q_, 4), k(k_, 4), v(v_, 4);
    const Shape s(q, k, v);
    const Lines by_q(kv_num, kv_idx, full_kv_num, full_kv_idx);
    const Tiles tiles(cells, ids);
    s.check_mask(by_q, tiles);
    Handle out = empty({s.B, s.H, s.Q, s.Dv}, q.dtype), lse = empty({s.B, s.H, s.Q}, aoti_torch_dtype_float32());
    for_dtype(q.dtype, [&](auto element) {
      using T = decltype(element);
      forward<T>(s, q, k, v, by_q, tiles, static_cast<float>(scale), View(out.value, 4).as<T>(),
                 View(lse.value, 3).as<float>());
    });
    *out_ = std::exchange(out.value, nullptr);
    *lse_ = std::exchange(lse.value, nullptr);
  });
}

extern "C" AOTITorchError aoti_torch_cpu_block_sparse_backward(
    AtenTensorHandle grad_out_, AtenTensorHandle grad_lse_, AtenTensorHandle q_, AtenTensorHandle k_,
    AtenTensorHandle v_, AtenTensorHandle out_, AtenTensorHandle lse_, AtenTensorHandle kv_num,
    AtenTensorHandle kv_idx, AtenTensorHandle full_kv_num, AtenTensorHandle full_kv_idx, AtenTensorHandle q_num,
    AtenTensorHandle q_idx, AtenTensorHandle full_q_num, AtenTensorHandle full_q_idx, AtenTensorHandle cells,
    AtenTensorHandle ids, double scale, AtenTensorHandle* dq_, AtenTensorHandle* dk_, AtenTensorHandle* dv_) {
  return guarded([&] {
    const View grad_out(grad_out_, 4), grad_lse(grad_lse_, 3), q(q_, 4), k(k_, 4), v(v_, 4), out(out_, 4), lse(lse_, 3);
    const Shape s(q, k, v);
    const Lines by_q(kv_num, kv_idx, full_kv_num, full_kv_idx), by_kv(q_num, q_idx, full_q_num, full_q_idx);
    const Tiles tiles(cells, ids);
    s.check_mask(by_q, tiles);
    require(by_kv.rows() == s.kv_blocks && by_kv.columns() == s.q_blocks && by_kv.batch() == by_q.batch(),
            "aotpack: the block mask was built for other lengths");
    Handle dq = empty({s.B, s.H, s.Q, s.D}, q.dtype), dk = empty({s.B, s.Hk, s.KV, s.D}, q.dtype);
    Handle dv = empty({s.B, s.Hk, s.KV, s.Dv}, q.dtype);
    const Buffer deltas(s.B * s.H * s.Q);
    for_dtype(q.dtype, [&](auto element) {
      using T = decltype(element);
      Backward<T>{s, grad_out, q, k, v, out, lse.as<float>(), grad_lse.as<float>(), by_q, by_kv, tiles,
                  static_cast<float>(scale), View(dq.value, 4).as<T>(), View(dk.value, 4).as<T>(),
                  View(dv.value, 4).as<T>(), deltas.data}
          .run();
    });
    *dq_ = std::exchange(dq.value, nullptr);
    *dk_ = std::exchange(dk.value, nullptr);
    *dv_ = std::exchange(dv.value, nullptr);
  });
}
