// The block mask of rows that see intervals of keys, without looking at their cells: work follows the number
// of rows, of blocks and of partial blocks.
//
// Shapes: low, high [B,Q,I] int64: row q sees the keys of the intervals [low, high), which may be empty,
// overlap, and reach past the keys. Outputs as in torch's BlockMask with blocks of 128 x 128, int32, counts
// [B,1,rows] and indices [B,1,rows,columns], the listed blocks first and then the others, both ascending;
// tiles [P,128,16] uint8: the cells of the partial blocks, one bit each (see block_sparse.cpp), in the order
// of the blocks; ids [B,1,Qblocks,KVblocks] int32, each block's number of partial blocks up to it, less 1.

#include <memory>

#include "common.h"

using namespace aotpack;

namespace {

enum State : uint8_t { kHidden, kPartial, kFull };

struct Interval {
  int64_t low, high;
};

struct Intervals {
  const View low, high;
  int64_t keys;
  Intervals(AtenTensorHandle low_, AtenTensorHandle high_, int64_t keys_)
      : low(low_, 3), high(high_, 3), keys(keys_) {
    require(std::equal(low.sizes, low.sizes + 3, high.sizes) && keys >= 0,
            "aotpack: the ends of the intervals do not fit each other");
  }
  int64_t batch() const { return low.sizes[0]; }
  int64_t queries() const { return low.sizes[1]; }

  // The visible keys of a row, as disjoint intervals that ascend.
  void row(int64_t b, int64_t q, std::vector<Interval>& found) const {
    const int64_t count = low.sizes[2], at = (b * queries() + q) * count;
    found.clear();
    for (int64_t i = at; i < at + count; ++i) {
      const Interval one{std::max<int64_t>(low.as<int64_t>()[i], 0), std::min(high.as<int64_t>()[i], keys)};
      if (one.low < one.high) found.push_back(one);
    }
    if (found.size() < 2) return;
    std::sort(found.begin(), found.end(), [](const Interval& a, const Interval& b) { return a.low < b.low; });
    size_t last = 0;
    for (size_t i = 1; i < found.size(); ++i)
      if (found[i].low <= found[last].high)
        found[last].high = std::max(found[last].high, found[i].high);
      else
        found[++last] = found[i];
    found.resize(last + 1);
  }
};

// The state of each block, [B,Qblocks,KVblocks], and how many partial ones there are up to each line.
struct Grid {
  int64_t batch, rows, columns;
  std::vector<uint8_t> states;
  std::vector<int64_t> partial_before;  // by line (b, row); one more at the end
  Grid(int64_t b, int64_t r, int64_t c)
      : batch(b), rows(r), columns(c), states(b * r * c), partial_before(b * r + 1, 0) {}
  const uint8_t* line(int64_t at) const { return states.data() + at * columns; }
  uint8_t* line(int64_t at) { return states.data() + at * columns; }
};

struct Scratch {
  std::vector<Interval> row;
  std::vector<int64_t> ends, wholes;  // visible cells at the ends of intervals; change in whole rows
  explicit Scratch(int64_t columns) : ends(columns), wholes(columns + 1) {}
};

void classify(const Intervals& seen, Grid& grid) {
  auto make = [&] { return std::make_unique<Scratch>(grid.columns); };
  for_each_task(grid.batch * grid.rows, make, [&](int64_t at, Scratch& m) {
    const int64_t b = at / grid.rows, first = at % grid.rows * kBlock;
    std::fill(m.ends.begin(), m.ends.end(), 0);
    std::fill(m.wholes.begin(), m.wholes.end(), 0);
    for (int64_t q = first; q < std::min(first + kBlock, seen.queries()); ++q) {
      seen.row(b, q, m.row);
      for (const Interval& one : m.row) {
        const int64_t begin = one.low / kBlock, end = (one.high - 1) / kBlock;
        if (begin == end) {
          m.ends[begin] += one.high - one.low;
          continue;
        }
        m.ends[begin] += (begin + 1) * kBlock - one.low;
        m.ends[end] += one.high - end * kBlock;
        ++m.wholes[begin + 1];
        --m.wholes[end];
      }
    }
    int64_t whole = 0, partial = 0;
    uint8_t* states = grid.line(at);
    for (int64_t j = 0; j < grid.columns; ++j) {
      whole += m.wholes[j];
      const int64_t cells = m.ends[j] + whole * kBlock;
      states[j] = cells == 0 ? kHidden : cells == kBlock * kBlock ? kFull : kPartial;
      partial += states[j] == kPartial;
    }
    grid.partial_before[at + 1] = partial;
  });
  for (int64_t at = 0; at < grid.batch * grid.rows; ++at) grid.partial_before[at + 1] += grid.partial_before[at];
}

// Counts and indices of the blocks in `wanted` state, by row or, transposed, by column.
std::pair<Handle, Handle> list(const Grid& grid, uint8_t wanted, bool transposed) {
  const int64_t rows = transposed ? grid.columns : grid.rows, columns = transposed ? grid.rows : grid.columns;
  Handle counts = empty({grid.batch, 1, rows}, aoti_torch_dtype_int32());
  Handle indices = empty({grid.batch, 1, rows, columns}, aoti_torch_dtype_int32());
  int32_t *count = View(counts.value, 3).as<int32_t>(), *index = View(indices.value, 4).as<int32_t>();
  auto nothing = [] { return std::make_unique<char>(); };
  for_each_task(grid.batch * rows, nothing, [&](int64_t at, char&) {
    const int64_t b = at / rows, row = at % rows;
    auto is_wanted = [&](int64_t j) {
      return grid.line(b * grid.rows + (transposed ? j : row))[transposed ? row : j] == wanted;
    };
    int32_t* listed = index + at * columns;
    for (const bool now : {true, false}) {
      for (int64_t j = 0; j < columns; ++j)
        if (is_wanted(j) == now) *listed++ = static_cast<int32_t>(j);
      if (now) count[at] = static_cast<int32_t>(listed - index - at * columns);
    }
  });
  return {std::move(counts), std::move(indices)};
}

void set_bits(uint8_t* row, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end;)
    if (j % 8 == 0 && j + 8 <= end) {
      row[j / 8] = 0xff;
      j += 8;
    } else {
      row[j / 8] |= static_cast<uint8_t>(1u << j % 8);
      ++j;
    }
}

void fill(const Intervals& seen, const Grid& grid, uint8_t* tiles, int32_t* ids) {
  auto make = [&] { return std::make_unique<Scratch>(grid.columns); };
  for_each_task(grid.batch * grid.rows, make, [&](int64_t at, Scratch& m) {
    int64_t id = grid.partial_before[at] - 1;
    const uint8_t* states = grid.line(at);
    int32_t* line = ids + at * grid.columns;
    for (int64_t j = 0; j < grid.columns; ++j) {
      id += states[j] == kPartial;
      line[j] = static_cast<int32_t>(id);
    }
    std::fill(tiles + grid.partial_before[at] * kBlock * kRowBytes,
              tiles + grid.partial_before[at + 1] * kBlock * kRowBytes, uint8_t{0});
    const int64_t b = at / grid.rows, first = at % grid.rows * kBlock;
    for (int64_t q = first; q < std::min(first + kBlock, seen.queries()); ++q) {
      seen.row(b, q, m.row);
      for (const Interval& one : m.row)
        for (int64_t j = one.low / kBlock; j <= (one.high - 1) / kBlock; ++j)
          if (states[j] == kPartial)
            set_bits(tiles + (line[j] * kBlock + q - first) * kRowBytes,
                     std::max(one.low - j * kBlock, int64_t{0}), std::min(one.high - j * kBlock, kBlock));
    }
  });
}

}  // namespace

extern "C" AOTITorchError aoti_torch_cpu_interval_block_mask(
    AtenTensorHandle low, AtenTensorHandle high, int64_t keys, AtenTensorHandle* kv_num, AtenTensorHandle* kv_idx,
    AtenTensorHandle* full_kv_num, AtenTensorHandle* full_kv_idx, AtenTensorHandle* q_num, AtenTensorHandle* q_idx,
    AtenTensorHandle* full_q_num, AtenTensorHandle* full_q_idx, AtenTensorHandle* tiles_, AtenTensorHandle* ids_) {
  return guarded([&] {
    const Intervals seen(low, high, keys);
    Grid grid(seen.batch(), (seen.queries() + kBlock - 1) / kBlock, (keys + kBlock - 1) / kBlock);
    classify(seen, grid);
    std::pair<Handle, Handle> lists[] = {list(grid, kPartial, false), list(grid, kFull, false),
                                         list(grid, kPartial, true), list(grid, kFull, true)};
    Handle tiles = empty({grid.partial_before.back(), kBlock, kRowBytes}, aoti_torch_dtype_uint8());
    Handle ids = empty({grid.batch, 1, grid.rows, grid.columns}, aoti_torch_dtype_int32());
    fill(seen, grid, View(tiles.value, 3).as<uint8_t>(), View(ids.value, 4).as<int32_t>());
    AtenTensorHandle* results[] = {kv_num, kv_idx, full_kv_num, full_kv_idx,
                                   q_num,  q_idx,  full_q_num,  full_q_idx};
    for (int i = 0; i < 4; ++i) {
      *results[2 * i] = std::exchange(lists[i].first.value, nullptr);
      *results[2 * i + 1] = std::exchange(lists[i].second.value, nullptr);
    }
    *tiles_ = std::exchange(tiles.value, nullptr);
    *ids_ = std::exchange(ids.value, nullptr);
  });
}
