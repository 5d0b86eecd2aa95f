// Rows of floats that are split into halves on their way into a warpgroup's registers, for sm_90a.
//
// A warp has 16 rows by 64 of depth of a step. Each row's 64 elements are scaled by a power of two of their own, so sums are
// promoted to float registers, and taken back to the rows' scale, at every step.
// Low parts are not scaled up as those of `ws_split.cuh` are: 22 bits of an element remain down to 2^-17 of the greatest
// of its 64 neighbours, and below that what counts against it, to 2^-39. They are multiplied first, while the tensor
// cores' accumulators, which round towards zero, are small.
#pragma once
#include "ws_product.cuh"

namespace ws {

constexpr int kFarthestExponent = 127 + 90;  // beyond which a row's products could leave the range of floats on the way

// Two floats as halves in one register, the first in the lower bits; and what they leave.
WS_INLINE unsigned halves_of(float first, float second) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
WS_INLINE unsigned rest_of(float first, float second, unsigned pair) {
  float high_first, high_second;
  asm("{\n.reg .b16 lower, upper;\nmov.b32 {lower, upper}, %2;\ncvt.f32.f16 %0, lower;\ncvt.f32.f16 %1, upper;\n}"
      : "=f"(high_first), "=f"(high_second) : "r"(pair));
  return halves_of(first - high_first, second - high_second);
}

// The power of two that takes a step's elements of a row to just below 2^15, and back. Denormals keep all their bits.
struct StepScale {
  float up, down;
  bool far;

  // By the exponent of the greatest, as a float has it.
  WS_INLINE explicit StepScale(unsigned greatest) {
    const unsigned exponent = max(greatest, 15u);
    up = __uint_as_float((127 + 127 + 14 - exponent) << 23);
    down = __uint_as_float((exponent - 14) << 23);
    far = exponent > kFarthestExponent;
  }
};

// The exponent of the greatest of four sizes; NaN are left aside, since a row with one has NaN everywhere.
WS_INLINE unsigned exponent_of(const float (&sizes)[4]) {
  return __float_as_uint(fmaxf(fmaxf(sizes[0], sizes[1]), fmaxf(sizes[2], sizes[3]))) >> 23;
}

// The scale of a row that four neighbouring threads have together.
WS_INLINE StepScale scale_of_four(const Pack<float, 4> (&row)[4]) {
  float greatest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    greatest[i] = fmaxf(fmaxf(fabsf(row[i][0]), fabsf(row[i][1])), fmaxf(fabsf(row[i][2]), fabsf(row[i][3])));
  unsigned exponent = exponent_of(greatest);
  exponent = max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 1));
  return StepScale(max(exponent, __shfl_xor_sync(0xffffffffu, exponent, 2)));
}

// Where in sixteen of depth the tensor cores have an element, and which one they have there: not in order, so that a thread,
// which they want to have places 2 q, 2 q + 1, 2 q + 8 and 2 q + 9, has four elements that are neighbours in memory.
WS_INLINE constexpr int place_of(int element) { return element % 4 / 2 * 8 + element / 4 * 2 + element % 2; }
WS_INLINE constexpr int element_at(int place) { return place % 8 / 2 * 4 + place / 8 * 2 + place % 2; }

// A warp's rows of one step as the asynchronous copies leave them. In odd rows packs of four are exchanged with those four
// further along, so that eight threads that read at once touch all banks.
struct alignas(128) StagedRows {
  float rows[16][kTileDepth];

  static WS_INLINE constexpr int place(int row, int pack) { return 4 * (pack ^ (row % 2 * 4)); }
};

// Asks for 64 elements of each of a warp's rows from `first` on; each copy takes two rows' 256 bytes. Unless all tiles are
// `kInside` the operand, rows beyond the last are the last.
template <int kRows, int64 kRowStride, bool kInside>
WS_INLINE void ask_for_rows(StagedRows& to, const float* __restrict__ operand, int first) {
  const int odd = threadIdx.x % 32 / 16, pack = threadIdx.x % 16;
  const float* from = operand + 4 * pack;
  if constexpr (kInside) from += (first + odd) * kRowStride;
  const ptx::SharedAddress place = ptx::shared_address(&to.rows[odd][StagedRows::place(odd, pack)]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64 row = kInside ? 2 * i : min(first + 2 * i + odd, kRows - 1);
    ptx::copy_async_16(place + i * 2 * sizeof(to.rows[0]), from + row * kRowStride);
  }
}

// What a thread has of 16 rows by 64 of depth: two rows, 8 apart; of each sixteen elements, four neighbours.
struct StreamedStep {
  Pack<float, 4> upper[4], lower[4];

  WS_INLINE explicit StreamedStep(const StagedRows& from) {
    const int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = StagedRows::place(row, 4 * i + quarter);
      upper[i] = *reinterpret_cast<const Pack<float, 4>*>(&from.rows[row][place]);
      lower[i] = *reinterpret_cast<const Pack<float, 4>*>(&from.rows[row + 8][place]);
    }
  }
};

// A warp's steps in shared memory, asked for as many ahead as there are places but one. `Rows::ask(to)` asks for the next
// step's rows, tile after tile, and behind the last for nothing: the group of copies is empty then.
template <int kSteps, class Rows> struct StepsAhead {
  StagedRows (&staged)[kSteps][8];
  Rows rows;
  int stage = 0, next = 0;

  WS_INLINE StepsAhead(StagedRows (&staged_)[kSteps][8], const Rows& rows_) : staged(staged_), rows(rows_) {
    for (int i = 1; i < kSteps; ++i) ask();
  }

  WS_INLINE void ask() {
    rows.ask(staged[next][threadIdx.x / 32 - 4]);
    ptx::commit_copies();
    next = next + 1 == kSteps ? 0 : next + 1;
  }

  // The next step.
  WS_INLINE StreamedStep take() {
    ask();  // all lanes have read what lay there: they have multiplied since
    ptx::wait_copies<kSteps - 1>();
    __syncwarp();
    const int here = stage;
    stage = stage + 1 == kSteps ? 0 : stage + 1;
    return StreamedStep(staged[here][threadIdx.x / 32 - 4]);
  }
};

// Halves of a step as the tensor cores take them: for each sixteen of depth, both rows' first pairs, then their second.
struct StepHalves {
  unsigned high[4][4], low[4][4];

  WS_INLINE void split(const StreamedStep& step, int i, float upper_up, float lower_up) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float a = step.upper[i][2 * pair] * upper_up, b = step.upper[i][2 * pair + 1] * upper_up;
      const float c = step.lower[i][2 * pair] * lower_up, d = step.lower[i][2 * pair + 1] * lower_up;
      high[i][2 * pair] = halves_of(a, b);
      high[i][2 * pair + 1] = halves_of(c, d);
      low[i][2 * pair] = rest_of(a, b, high[i][2 * pair]);
      low[i][2 * pair + 1] = rest_of(c, d, high[i][2 * pair + 1]);
    }
  }

  // They are made before this point, or stay in their registers until it.
  WS_INLINE void settle(int i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(high[i][j]), "+r"(low[i][j])::"memory");
  }
};

// The products of a step's rows with 128 rows of the other operand, whose halves `ready` says to be there: `sums` of this step
// alone. Low parts come first, those of `kTogether` times sixteen of depth as soon as these are split.
template <int kTogether>
WS_INLINE void multiply_step(float (&sums)[64], const StreamedStep& step, float upper_up, float lower_up,
                             const half* other_high, const half* other_low, Barrier& ready, int parity) {
  const uint64 other = operand_at<kAlong>(other_high), other_rest = operand_at<kAlong>(other_low);
  StepHalves rows;
#pragma unroll
  for (int first = 0; first < 4; first += kTogether) {
#pragma unroll
    for (int i = first; i < first + kTogether; ++i) rows.split(step, i, upper_up, lower_up);
    if (first == 0) ready.wait(parity);
#pragma unroll
    for (int i = first; i < first + kTogether; ++i) rows.settle(i);
    products_begin();
#pragma unroll
    for (int i = first; i < first + kTogether; ++i) {
      multiply_add_held<half, kAlong>(sums, rows.high[i], further<kAlong>(other_rest, 16 * i), i > 0);
      multiply_add_held<half, kAlong>(sums, rows.low[i], further<kAlong>(other, 16 * i), 1);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) multiply_add_held<half, kAlong>(sums, rows.high[i], further<kAlong>(other, 16 * i), 1);
  products_commit();
  products_wait<0>();
  settle(sums);
#pragma unroll
  for (int i = 0; i < 4; ++i) rows.settle(i);
}

}  // namespace ws
