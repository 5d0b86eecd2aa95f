// Attention of floats in one kernel, on tensor cores that multiply halves, for sm_90a: `ws_attention.cuh` with every element
// as a pair of halves (see `ws_split.cuh`), more accurate than attention in floats.
//
// Scores are three products, high by high and the two cross products, which are 2048 times smaller; so are sums of values.
// Weights are split in registers, with low parts that are not scaled up: 22 bits of a weight remain down to 2^-17, and below
// that what counts against one, to 2^-40. Tensor cores round towards zero, so they sum over 64 elements of depth, or 64 keys, at
// most, low parts first; all else is summed in float registers.
// Halves are made by kernels before (`ws_attention_halves.cuh`), with one scale a layer of each operand.
#pragma once
#include "ws_attention.cuh"

namespace ws {

template <AttentionExtents kExtents, AttentionTiling kTiling, class Mask = NoMask>
using SplitAttention = Attention<half, kExtents, AttentionOffsets{0, 0, 0}, kTiling, Mask, 2>;

// Roots of what takes halves back to the operands' scale, by layer: see `RowScale`.
struct AttentionRoots {
  const float *queries, *keys, *values;
};

constexpr float kWeightUp = 0x1p15f;  // takes weights, of which none exceeds one, to the halves' range

// What is to be worked out here, and not kept in registers from step to step.
template <class T> WS_INLINE T made_here(T value) {
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(value));
  else asm volatile("" : "+r"(value));
  return value;
}

// Weights as tensor cores take them.
template <class A> struct WeightHalves {
  unsigned high[A::kScores / 2], low[A::kScores / 2];

  WS_INLINE void split(const float (&weights)[A::kScores]) {
#pragma unroll
    for (int i = 0; i < A::kScores / 2; ++i) {
      const float first = weights[2 * i] * kWeightUp, second = weights[2 * i + 1] * kWeightUp;
      high[i] = ptx::half_pair(first, second);
      low[i] = ptx::half_pair(first - ptx::float_of_half(high[i] & 0xffffu), second - ptx::float_of_half(high[i] >> 16));
    }
  }
  WS_INLINE void settle() {
    ws::settle(high);
    ws::settle(low);
  }
};

// Products under way. Scores and sums take the same accumulators, one after the other: each use that had its own would keep
// their registers from step to step.
template <class A> struct SplitProducts {
  static constexpr int kColumns = A::kOwnColumns < 64 ? A::kOwnColumns : 64;  // whose sums are made at once
  static constexpr bool kAlike = A::kScores == kColumns / 2;
  float main[A::kScores], cross[A::kScores];
  float narrow_main[kAlike ? 1 : kColumns / 2], narrow_cross[kAlike ? 1 : kColumns / 2];

  WS_INLINE auto& main_sums() {
    if constexpr (kAlike) return main;
    else return narrow_main;
  }
  WS_INLINE auto& cross_sums() {
    if constexpr (kAlike) return cross;
    else return narrow_cross;
  }

  // Those of a tile's queries and keys: all cross products, and the main ones of the first 64 of depth.
  WS_INLINE void begin_scores(const AttentionTiles<A>& shared, int warpgroup, int stage) {
    const uint64 queries = queries_at(shared, warpgroup), keys = keys_at(shared, stage);
    products_begin();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < A::kDepth; k += 16)
        multiply_add<half, kAlong, kAlong>(cross, at<A::kTileQueries>(queries, part, k),
                                           at<A::kTileKeys>(keys, 1 - part, k), k + part > 0);
    }
    multiply_main(queries, keys, 0);
    products_commit();
  }
  // Once these have been waited for.
  WS_INLINE void end_scores(float (&scores)[A::kScores], const AttentionTiles<A>& shared, int warpgroup, int stage) {
    settle(main);
    settle(cross);
#pragma unroll
    for (int i = 0; i < A::kScores; ++i) scores[i] = main[i] + cross[i] * (1.0f / kLowScale);
#pragma unroll
    for (int block = 1; block < A::kDepthBlocks; ++block) {
      settle(scores);
      products_begin();
      multiply_main(queries_at(shared, warpgroup), keys_at(shared, stage), block);
      products_commit();
      products_wait<0>();
      settle(main);
#pragma unroll
      for (int i = 0; i < A::kScores; ++i) scores[i] += main[i];
    }
  }
  WS_INLINE void multiply_main(uint64 queries, uint64 keys, int block) {
#pragma unroll
    for (int k = 64 * block; k < A::kDepth && k < 64 * (block + 1); k += 16)
      multiply_add<half, kAlong, kAlong>(main, at<A::kTileQueries>(queries, 0, k),
                                         at<A::kTileKeys>(keys, 0, k), k % 64 > 0);
  }
  static WS_INLINE uint64 queries_at(const AttentionTiles<A>& shared, int warpgroup) {
    return made_here(operand_at<kAlong>(shared.queries[0] + warpgroup * A::kOwnRows * 64));
  }
  static WS_INLINE uint64 keys_at(const AttentionTiles<A>& shared, int stage) {
    return made_here(operand_at<kAlong>(shared.keys[stage][0]));
  }
  // Of an operand's part, from an element of depth on.
  template <int kRows> static WS_INLINE uint64 at(uint64 operand, int part, int k) {
    constexpr int kBlock = kRows * 64 * sizeof(half) / 16;
    return further<kAlong>(operand + (part * A::kDepthBlocks + k / 64) * kBlock, k % 64);
  }

  // Those of weights of some keys and up to 64 columns of values.
  WS_INLINE void begin_sums(const WeightHalves<A>& weights, const AttentionTiles<A>& shared, int stage, int first_key, int block) {
    const uint64 high = made_here(operand_at<kAcross, A::kTileKeys>(shared.values[stage][block]));
    const uint64 low = high + A::kColumnBlocks * sizeof(shared.values[0][0]) / 16;
    products_begin();
#pragma unroll
    for (int part = 0; part < 3; ++part) {
#pragma unroll
      for (int n = first_key; n < first_key + A::kPromote; n += 16)
        multiply_add_held<half, kAcross>(part == 2 ? cross_sums() : main_sums(), (part == 0 ? weights.low : weights.high) + n / 4,
                                         further<kAcross>(part == 2 ? low : high, n), part == 1 || n > first_key);
    }
    products_commit();
  }
  // Once these have been waited for.
  WS_INLINE void add_to(float (&sums)[A::kSums], int block) {
    settle(main_sums());
    settle(cross_sums());
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      sums[32 * block + i] += main_sums()[i] + cross_sums()[i] * (1.0f / kLowScale);
    settle(sums);  // before other products take the registers
  }
};

// What a warpgroup does with a tile of queries, step by step.
template <class A> struct SplitSteps {
  AttentionTiles<A>& shared;
  const typename A::Mask::Element* __restrict__ mask;
  int layer, warpgroup, first, row;  // the warpgroup's first row, and the upper of the thread's
  float scale, to_log2;
  OnlineSoftmax softmax = {};
  WeightHalves<A> weights;
  MaskTile<A> masked;

  // A mask of wide rows is not asked for before there are registers for it, and then by quarters.
  static constexpr bool kEarly = A::kDepthBlocks == 1 && A::kColumnBlocks == 1;
  WS_INLINE void load_early(int step) {
    if constexpr (kEarly) masked.load(mask, layer, row, step);
  }
  WS_INLINE void apply_mask(float (&scores)[A::kScores], int step) {
    if constexpr (kEarly || !A::Mask::kIsGiven) {
      masked.add_to(scores, scale);
    } else {
      constexpr int kQuarter = A::kScores / 8;
      apply_part<0, kQuarter>(scores, step);
      apply_part<kQuarter, 2 * kQuarter>(scores, step);
      apply_part<2 * kQuarter, 3 * kQuarter>(scores, step);
      apply_part<3 * kQuarter, 4 * kQuarter>(scores, step);
    }
  }
  template <int kBegin, int kEnd> WS_INLINE void apply_part(float (&scores)[A::kScores], int step) {
    masked.template load<kBegin, kEnd>(made_here(mask), made_here(layer), made_here(row), step);
    masked.template add_to<kBegin, kEnd>(scores, scale);
    settle(scores);
  }

  // Makes weights of a step's scores once these have been waited for, and brings the sums before to the same pivot.
  WS_INLINE void weigh(SplitProducts<A>& products, float (&sums)[A::kSums], int stage, int step) {
    float scores[A::kScores], rescale[2];
    products.end_scores(scores, shared, warpgroup, stage);
    release<A>(shared.keys_free[stage]);
    apply_mask(scores, step);
    if (is_hidden<A>(step, first)) hide<A>(scores, step, made_here(row));
    if (softmax.take<true, true>(scores, to_log2, 0.0f, rescale) && step > 0) {
#pragma unroll
      for (int i = 0; i < A::kSums; ++i) sums[i] *= rescale[i / 2 % 2];
    }
    weights.split(scores);
  }

  // Adds what the weights of a step's keys make of its values, kPromote keys by 64 columns at a time.
  WS_INLINE void add_values(SplitProducts<A>& products, float (&sums)[A::kSums], int stage) {
#pragma unroll
    for (int key = 0; key < A::kTileKeys; key += A::kPromote) {
#pragma unroll
      for (int block = 0; block < A::kColumnBlocks; ++block) {
        products.begin_sums(weights, shared, stage, key, block);
        products_wait<0>();
        weights.settle();
        products.add_to(sums, block);
      }
    }
    release<A>(shared.values_free[stage]);
  }
};

// The sums of a tile's 64 rows, in the unit of values; what lies in `place` moves on by the steps taken. `scale` is as `attend`
// has it, of scores of halves.
template <class A>
WS_INLINE void attend_split(AttentionTiles<A>& shared, RingPlace<A::kStages>& place, const Turns<A>& turns,
                            const typename A::QueryTile& tile, float scale,
                            const typename A::Mask::Element* __restrict__ mask, const float* value_roots,
                            float (&sums)[A::kSums]) {
  // Sums of one step are made beside the scores of the next where registers hold both.
  constexpr bool kBeside = A::kTileKeys == A::kPromote && A::kColumnBlocks == 1 && A::kDepthBlocks == 1 && A::kWarpgroups == 2 &&
                           !(A::Mask::kIsGiven && sizeof(typename A::Mask::Element) == sizeof(float));
  const int warpgroup = turns.warpgroup, first = tile.first_row() + A::kOwnRows * warpgroup, steps = tile.steps();
  const int thread = threadIdx.x % 128, row = first + 16 * (thread / 32) + thread % 32 / 4;
  SplitSteps<A> step_of{shared, mask, tile.layer, warpgroup, first, row, scale, A::Mask::kIsAdded ? 1.4426950408889634f : scale};
  SplitProducts<A> products;
#pragma unroll
  for (int i = 0; i < A::kSums; ++i) sums[i] = 0.0f;
  shared.keys_filled[place.stage].wait(place.parity);
  turns.take();
  products.begin_scores(shared, warpgroup, place.stage);
  turns.give();
  step_of.load_early(0);
  products_wait<0>();
  step_of.weigh(products, sums, place.stage, 0);
  RingPlace<A::kStages> previous = place;
  place.advance();
  for (int step = 1; step < steps; ++step) {
    shared.keys_filled[place.stage].wait(place.parity);
    shared.values_filled[previous.stage].wait(previous.parity);
    turns.take();
    if constexpr (kBeside) {
      SplitProducts<A> last;
      last.begin_sums(step_of.weights, shared, previous.stage, 0, 0);
      products.begin_scores(shared, warpgroup, place.stage);
      turns.give();
      step_of.load_early(step);
      products_wait<1>();  // the sums; the scores run on
      step_of.weights.settle();
      last.add_to(sums, 0);
      release<A>(shared.values_free[previous.stage]);
    } else {
      step_of.add_values(products, sums, previous.stage);
      products.begin_scores(shared, warpgroup, place.stage);
      turns.give();
      step_of.load_early(step);
    }
    products_wait<0>();
    step_of.weigh(products, sums, place.stage, step);
    previous = place;
    place.advance();
  }
  release<A>(shared.queries_free);
  shared.values_filled[previous.stage].wait(previous.parity);
  step_of.add_values(products, sums, previous.stage);
  const float value_root = value_roots[tile.layer / A::kValueGroup];
  float wholes[2];  // divided by: one rounding less than with their reciprocals
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    wholes[lower] = step_of.softmax.whole(lower) * kWeightUp;
    if (wholes[lower] == 0.0f) wholes[lower] = infinity<float>();  // a row that sees nothing is zero
  }
#pragma unroll
  for (int i = 0; i < A::kSums; ++i) sums[i] = sums[i] / wholes[i / 2 % 2] * value_root * value_root;
}

// Whether halves stand for a layer of all operands, and no score can leave the range of floats where floats would not.
template <class A> WS_INLINE bool has_halves(const AttentionRoots& roots, int layer) {
  constexpr float kMost = 0x1p88f;  // of what takes scores back, of which none of 128 products of halves exceeds 2^37
  const float root = roots.queries[layer] * roots.keys[layer / A::kKeyGroup], value_root = roots.values[layer / A::kValueGroup];
  return root * root < kMost && value_root == value_root;
}

// The whole of attention, of maps of halves.
template <class A, class Finish>
WS_INLINE void attention_of_halves(const TensorMap& queries, const TensorMap& keys, const TensorMap& values,
                                   const AttentionRoots& roots, float scale,
                                   const typename A::Mask::Element* __restrict__ mask, const Finish& finish) {
  with_query_tiles<A>(
      queries, keys, values,
      [&](AttentionTiles<A>& shared, RingPlace<A::kStages>& place, const Turns<A>& turns,
          const typename A::QueryTile& tile, float (&sums)[A::kSums]) {
        const float root = roots.queries[tile.layer] * roots.keys[tile.layer / A::kKeyGroup];
        attend_split<A>(shared, place, turns, tile, root * scale * root, mask, roots.values, sums);
      },
      finish);
}

}  // namespace ws
