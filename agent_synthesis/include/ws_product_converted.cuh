// A product of two operands of floats that are both read as they are, and split on the way to the tensor cores, for sm_90a:
// sums[layer][m, n] = sum over k of left[layer][m, k] * right[layer][n, k], the left's rows along the depth and the right's
// across. Nothing is written in between and no scale is looked for before, so each operand moves once.
//
// Of the left a warp stages its own 16 rows in shared memory and splits them into its registers (`ws_product_rows.cuh`).
// Of the right the copy engine brings 64 of depth by 128 columns; a warpgroup takes a column to a thread, scales its 64
// elements by a power of two, and writes halves where the tensor cores find them. Two warpgroups multiply 64 rows each, take
// both scales back at each step, and add in float registers.
// Each block brings its own columns: two that share them as a cluster wait for each other (0.65 ms instead of 0.48 at 256 x
// 524288 x 256, H200).
#pragma once
#include "ws_product_rows.cuh"

namespace ws {

// In shared memory: steps of the left's rows, of the right's boxes, and of its halves.
struct ConvertedStages {
  int left, right, halves;
};

// `P` is the product's shape, by tiles of 128 columns.
template <class P, Operand kLeftOperand, ConvertedStages kDepths> struct ConvertedProduct : P {
  static constexpr int kParts = 1;  // what reaches the end has no scale any more
  static constexpr Operand kRows = kLeftOperand;
  static constexpr int kLeftStages = kDepths.left, kRightStages = kDepths.right, kHalvesStages = kDepths.halves;
  static constexpr int kColumns = P::kTileColumns;
  static_assert(kColumns == 128 && P::kWarpgroups == 2 && P::kCluster == 1, "a thread takes a column, a warpgroup 64 rows");

  struct Shared {
    half halves[kHalvesStages][2][kColumns * kTileDepth];
    float right[kRightStages][kTileDepth * kColumns];
    StagedRows left[kLeftStages][8];
    float down[kHalvesStages][kColumns];
    Barrier arrived[kRightStages], read[kRightStages];
    Barrier ready[kHalvesStages], used[kHalvesStages];
  };
};

// The steps of all tiles of a block, one after the other.
template <class P> struct Steps {
  int number = blockIdx.x, step = 0, count = 0;

  WS_INLINE Steps() { enter(); }
  WS_INLINE bool more() const { return number < P::kTiles; }
  WS_INLINE typename P::Tile tile() const { return P::tile_at(number); }
  WS_INLINE void enter() { count = P::depth_of(tile().layer) / kTileDepth; }
  WS_INLINE void advance() {
    if (++step < count) return;
    step = 0;
    number += gridDim.x;
    enter();
  }
};

// One thread asks for the next box of the right, once all columns have been read of what lay there.
template <class P>
WS_INLINE void ask_for_columns(typename P::Shared& shared, const TensorMap& right, Steps<P>& asked,
                               RingPlace<P::kRightStages>& place) {
  if (!asked.more()) return;
  const typename P::Tile tile = asked.tile();
  shared.read[place.stage].wait(place.parity ^ 1);
  shared.arrived[place.stage].expect(sizeof(shared.right[0]));
  const int depth = tile.layer % P::kSlices * P::kSlice + asked.step * kTileDepth;
  copy_layer<P::kRightLayers, 1>(right, shared.arrived[place.stage], shared.right[place.stage], tile.first_column(), depth, 0,
                                 tile.layer / P::kSlices);
  place.advance();
  asked.advance();
}

// Scales a column's elements and writes their halves in the order of `place_of`: with the swizzle, pack after pack.
WS_INLINE void write_halves(const float (&values)[kTileDepth], float up, half* high, half* low, int column) {
#pragma unroll
  for (int pack = 0; pack < kTileDepth / 8; ++pack) {
    unsigned highs[4], lows[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int element = pack / 2 * 16 + element_at(pack % 2 * 8 + 2 * q);
      const float a = values[element] * up, b = values[element + 1] * up;
      highs[q] = halves_of(a, b);
      lows[q] = rest_of(a, b, highs[q]);
    }
    const int place = column * kTileDepth + 8 * (pack ^ column % 8);
    *reinterpret_cast<uint4*>(high + place) = make_uint4(highs[0], highs[1], highs[2], highs[3]);
    *reinterpret_cast<uint4*>(low + place) = make_uint4(lows[0], lows[1], lows[2], lows[3]);
  }
}

// The warpgroup that converts, a column to a thread. Columns that have no scale get NaN in `roots`, all others 1.
template <class P>
WS_INLINE void convert_columns(typename P::Shared& shared, const TensorMap& right, float* roots, Marks* marks) {
  const int column = threadIdx.x, lane = threadIdx.x % 32;
  Steps<P> asked;
  RingPlace<P::kRightStages> asking, place;
  RingPlace<P::kHalvesStages> to;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < P::kRightStages; ++i) ask_for_columns<P>(shared, right, asked, asking);
  }
  bool far = false;
  for (Steps<P> at; at.more();) {
    shared.arrived[place.stage].wait(place.parity);
    const float* from = shared.right[place.stage] + column;
    float values[kTileDepth], greatest[4] = {};
#pragma unroll
    for (int k = 0; k < kTileDepth; ++k) {
      values[k] = from[k * P::kColumns];
      greatest[k % 4] = fmaxf(greatest[k % 4], fabsf(values[k]));
    }
    __syncwarp();
    if (lane == 0) shared.read[place.stage].arrive();
    place.advance();
    const StepScale scale(exponent_of(greatest));
    far |= scale.far;
    shared.used[to.stage].wait(to.parity ^ 1);
    write_halves(values, scale.up, shared.halves[to.stage][0], shared.halves[to.stage][1], column);
    shared.down[to.stage][column] = scale.down;
    publish_writes();
    __syncwarp();
    if (lane == 0) shared.ready[to.stage].arrive();
    to.advance();
    if (threadIdx.x == 0) ask_for_columns<P>(shared, right, asked, asking);
    if (at.step == at.count - 1) {
      const typename P::Tile tile = at.tile();
      const int n = tile.first_column() + column;
      if (tile.row == 0 && n < P::kN)
        write_root(roots + tile.layer * static_cast<int64>(P::kN) + n, far ? quiet_nan<float>() : 1.0f, marks);
      far = false;
    }
    at.advance();
  }
}

// What a warp asks for next of the left: its rows of one step after the other, tile after tile.
template <class P> struct LeftRows {
  const float* left;
  const float* from = nullptr;  // the layer, at the step's depth
  int number = blockIdx.x, first = 0, rest = 0;

  WS_INLINE explicit LeftRows(const float* operand) : left(operand) { enter(); }
  WS_INLINE void enter() {
    const typename P::Tile tile = P::tile_at(number);
    from = left + Split<P::kRows>::layer_at(tile.layer);
    first = tile.first_row(0) + 16 * (threadIdx.x / 32 - 4);
    rest = P::depth_of(tile.layer) / kTileDepth;
  }
  WS_INLINE void ask(StagedRows& to) {
    if (number >= P::kTiles) return;
    ask_for_rows<P::kM, P::kRows.row_stride, P::kM % kTileRows == 0>(to, from, first);
    from += kTileDepth;
    if (--rest == 0) {
      number += gridDim.x;
      enter();
    }
  }
};

// What a multiplying thread adds up of a tile, and whether a row's elements were too far.
template <class P> struct ConvertedTile {
  float sums[64];
  bool upper_far = false, lower_far = false;

  WS_INLINE ConvertedTile() {
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = 0.0f;
  }

  // The step's sums go back to the rows' and the columns' own scale one after the other, so that no factor leaves the range
  // of floats.
  WS_INLINE void add(typename P::Shared& shared, RingPlace<P::kHalvesStages>& place, const StreamedStep& step) {
    const StepScale upper = scale_of_four(step.upper), lower = scale_of_four(step.lower);
    upper_far |= upper.far;
    lower_far |= lower.far;
    float step_sums[64];
    const int here = place.stage;
    multiply_step<4>(step_sums, step, upper.up, lower.up, shared.halves[here][0], shared.halves[here][1], shared.ready[here],
                     place.parity);
    place.advance();
    const float* columns = shared.down[here] + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const Pack<float, 2> down = *reinterpret_cast<const Pack<float, 2>*>(columns + 8 * i);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sums[4 * i + e] = fmaf(step_sums[4 * i + e] * upper.down, down[e], sums[4 * i + e]);
        sums[4 * i + 2 + e] = fmaf(step_sums[4 * i + 2 + e] * lower.down, down[e], sums[4 * i + 2 + e]);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.used[here].arrive();
  }
};

// A warpgroup that multiplies: all its tiles, each to its end.
template <class P, class Finish>
WS_INLINE void multiply_rows(typename P::Shared& shared, const float* __restrict__ left, float* roots, Marks* marks,
                             const Finish& finish) {
  StepsAhead<P::kLeftStages, LeftRows<P>> ahead(shared.left, LeftRows<P>(left));
  RingPlace<P::kHalvesStages> place;
  for (int number = blockIdx.x; number < P::kTiles; number += gridDim.x) {
    const typename P::Tile tile = P::tile_at(number);
    const int steps = P::depth_of(tile.layer) / kTileDepth;
    ConvertedTile<P> made;
    for (int step = 0; step < steps; ++step) made.add(shared, place, ahead.take());
    const int row = tile.first_row(0) + 16 * (threadIdx.x / 32 - 4) + threadIdx.x % 32 / 4;
    if (tile.column == 0 && threadIdx.x % 4 == 0) {
      float* to = roots + tile.layer * static_cast<int64>(P::kM) + row;
      if (row < P::kM) write_root(to, made.upper_far ? quiet_nan<float>() : 1.0f, marks);
      if (row + 8 < P::kM) write_root(to + 8, made.lower_far ? quiet_nan<float>() : 1.0f, marks);
    }
    finish_tile<P>({tile, 0, static_cast<int>(threadIdx.x) / 128 - 1}, made.sums, nullptr, nullptr, finish);
  }
}

// The whole product; `finish` as `multiply` has it. Rows and columns that have no scale get NaN among the roots, all others 1:
// the repair makes their products.
template <class P, class Finish>
WS_INLINE void multiply_converted(const float* __restrict__ left, const TensorMap& right, float* left_roots,
                                  float* right_roots, Marks* marks, const Finish& finish) {
  extern __shared__ char memory[];
  char* aligned = memory + (0u - shared_address(memory)) % 1024;
  typename P::Shared& shared = *reinterpret_cast<typename P::Shared*>(aligned);
  if (threadIdx.x == 0) {
    prefetch_map(right);
    for (int i = 0; i < P::kRightStages; ++i) {
      shared.arrived[i].begin(1);
      shared.read[i].begin(4);
    }
    for (int i = 0; i < P::kHalvesStages; ++i) {
      shared.ready[i].begin(4);
      shared.used[i].begin(8);
    }
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    keep_registers<104>();
    convert_columns<P>(shared, right, right_roots, marks);
  } else {
    take_registers<200>();
    multiply_rows<P>(shared, left, left_roots, marks, finish);
  }
}

}  // namespace ws
