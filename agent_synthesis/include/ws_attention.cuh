// Attention in one kernel: out[layer][m, d] = sum over n of weight[m, n] * values[layer][n, d], where a row of weights is the
// softmax over n of scale * (sum over k of queries[layer][m, k] * keys[layer][n, k]) + mask[layer][m, n], for sm_90a; a
// few layers of queries may share one of keys and values.
//
// One warp copies: a tile of queries, then tiles of keys and of values through two rings of stages. Two or three warpgroups
// take 64 queries each and keep scores, weights and sums in registers (FlashAttention-3, arXiv 2407.08608): while tensor cores
// make a tile's scores and add the tile before to the sums, nothing else may touch either, so the softmax of one tile runs
// beside the other product of the same warpgroup, and beside both of another one where warpgroups take turns.
// Weights are exponentials of what a score is above a pivot (arXiv 1805.02867), rounded to the operands' type; their sum is of
// floats that were not rounded. The pivot is the greatest score so far, or lags behind it by a few binades of weights.
#pragma once
#include "ws_product.cuh"

namespace ws {

// Two floats rounded to nearest, ties to even; the first in the lower half.
template <class T> WS_INLINE unsigned rounded_pair(float first, float second) {
  if constexpr (kIsHalf<T>) return ptx::half_pair(first, second);
  else return ptx::bfloat16_pair(first, second);
}

// `layers` is heads times batch, of which `inner` are walked by the maps' third coordinate; `group` neighbours share keys and
// values where `key_group` and `value_group` are as many, and have their own where these are one; `depth` of queries and keys, and `columns` of values, up to 256; `pack`: neighbouring columns that the end takes
// at once; `causal`: query m sees keys 0 to m.
struct AttentionExtents {
  int layers, inner, group = 1, key_group = 1, value_group = 1, queries, keys, depth, columns, pack;
  bool causal;
};
// Elements before an operand's first one in its map's rows.
struct AttentionOffsets {
  int queries, keys, values;
};
// `keys` of a tile, `stages` of either ring, `warpgroups` that multiply, whether these take turns at the tensor cores, and
// binades by which a weight may exceed one before the pivot moves; of floats, `promote` keys whose products tensor cores sum.
struct AttentionTiling {
  int keys, stages, warpgroups;
  bool turns;
  int lag, promote = 64;
};

// Elements of memory from one element of a mask to the next: from one outer layer, one inner layer of keys, one member of
// those that share them, one row and one key to the next; `pairs`: two keys come at once.
struct MaskSteps {
  int64 offset, outer, inner, member, row, key;
  bool pairs;
};
// What scores get: floats, in the unit of scaled scores, or bools that say which of them count.
template <class T, MaskSteps kSteps_> struct Mask {
  using Element = T;
  static constexpr MaskSteps kSteps = kSteps_;
  static constexpr bool kIsGiven = true, kIsAdded = sizeof(T) > sizeof(bool);
};
struct NoMask {
  using Element = bool;
  static constexpr bool kIsGiven = false, kIsAdded = false;
};

// `kPieces_`: elements that stand for one of an operand's: floats come as two halves each (`ws_attention_split.cuh`).
template <class Element_, AttentionExtents kExtents, AttentionOffsets kOffsets_, AttentionTiling kTiling,
          class Mask_ = NoMask, int kPieces_ = 1>
struct Attention {
  using Element = Element_;
  using Mask = Mask_;
  static constexpr AttentionOffsets kOffsets = kOffsets_;
  static constexpr int kM = kExtents.queries, kN = kExtents.columns, kPack = kExtents.pack, kParts = 1, kCluster = 1;
  static constexpr int kPieces = kPieces_;
  static constexpr int kKeys = kExtents.keys, kDepth = kExtents.depth, kInner = kExtents.inner;
  static constexpr int kGroup = kExtents.group, kKeyGroup = kExtents.key_group, kValueGroup = kExtents.value_group;
  static constexpr int kTileKeys = kTiling.keys, kStages = kTiling.stages;
  static constexpr bool kTurns = kTiling.turns, kCausal = kExtents.causal;
  static constexpr float kLag = kTiling.lag;
  static constexpr int kPromote = kTiling.promote;
  static constexpr int kDepthBlocks = (kDepth + 63) / 64, kColumnBlocks = (kN + 63) / 64;  // of 64 elements, 128 bytes
  static constexpr int kOwnColumns = kPieces == 2 && kN <= 32 ? 32 : 64 * kColumnBlocks;  // of a warpgroup
  static constexpr int kSums = kOwnColumns / 2;                                            // of a thread
  static constexpr int kScores = kTileKeys / 2;
  static constexpr int kSteps = (kKeys + kTileKeys - 1) / kTileKeys;
  static constexpr int kWarpgroups = kTiling.warpgroups, kOwnRows = 64, kTileQueries = kOwnRows * kWarpgroups;
  static constexpr int kRowTiles = (kM + kTileQueries - 1) / kTileQueries;
  static constexpr int kLayers = kExtents.layers, kTiles = kRowTiles * kLayers;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  // Registers of a thread that multiplies, and of one that copies, which hands the others back.
  static constexpr int kRegisters = kWarpgroups == 2 ? 240 : 160, kCopyingRegisters = kWarpgroups == 2 ? 24 : 32;

  struct QueryTile {
    int layer, row;
    WS_INLINE int first_row() const { return row * kTileQueries; }
    // Tiles of keys that some row sees.
    WS_INLINE int steps() const {
      return kCausal ? min(kSteps, ((row + 1) * kTileQueries + kTileKeys - 1) / kTileKeys) : kSteps;
    }
  };
  // A warpgroup's rows, as `finish_tile` takes them.
  struct Tile {
    int layer, first;
    WS_INLINE int first_row(int) const { return first; }
    WS_INLINE int first_column() const { return 0; }
  };
  // Tiles of one layer follow each other, so that blocks share its keys and values in the second-level cache. Causal ones
  // begin with the longest of all layers, so that all blocks end at about the same time.
  static WS_INLINE QueryTile tile_at(int number) {
    if constexpr (kCausal) return {number % kLayers, kRowTiles - 1 - number / kLayers};
    else return {number / kRowTiles, number % kRowTiles};
  }
};

// Blocks of 64 elements, each a box of the copy engine's.
template <class A> struct alignas(1024) AttentionTiles {
  typename A::Element queries[A::kPieces * A::kDepthBlocks][A::kTileQueries * 64];
  typename A::Element keys[A::kStages][A::kPieces * A::kDepthBlocks][A::kTileKeys * 64];
  typename A::Element values[A::kStages][A::kPieces * A::kColumnBlocks][A::kTileKeys * 64];
  Barrier queries_filled, queries_free;
  Barrier keys_filled[A::kStages], keys_free[A::kStages];
  Barrier values_filled[A::kStages], values_free[A::kStages];
};

// Of neighbouring layers, kShare are one in memory. Pieces lie one after the other, there and in shared memory.
template <class A, int kShare, int kBoxes, int kRows>
WS_INLINE void copy_tile(const TensorMap& map, Barrier& filled, typename A::Element (&to)[kBoxes][kRows], int offset,
                         int row, int layer) {
  filled.expect(sizeof(to));
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    constexpr int kBlocks = kBoxes / A::kPieces;
    if constexpr (A::kPieces == 2) copy_box(map, filled, to[box], 64 * (box % kBlocks), row, box / kBlocks, layer / kShare);
    else copy_box(map, filled, to[box], offset + 64 * box, row, layer % A::kInner / kShare, layer / A::kInner);
  }
}

template <class A>
WS_INLINE void copy_attention(AttentionTiles<A>& shared, const TensorMap& queries, const TensorMap& keys,
                              const TensorMap& values) {
  RingPlace<A::kStages> place;
  int parity = 0;
  for (int number = blockIdx.x; number < A::kTiles; number += gridDim.x) {
    const typename A::QueryTile tile = A::tile_at(number);
    shared.queries_free.wait(parity ^ 1);
    copy_tile<A, 1>(queries, shared.queries_filled, shared.queries, A::kOffsets.queries, tile.first_row(), tile.layer);
    parity ^= 1;
    for (int step = 0; step < tile.steps(); ++step) {
      const int stage = place.stage;
      shared.keys_free[stage].wait(place.parity ^ 1);
      copy_tile<A, A::kKeyGroup>(keys, shared.keys_filled[stage], shared.keys[stage], A::kOffsets.keys, step * A::kTileKeys,
                              tile.layer);
      shared.values_free[stage].wait(place.parity ^ 1);
      copy_tile<A, A::kValueGroup>(values, shared.values_filled[stage], shared.values[stage], A::kOffsets.values,
                              step * A::kTileKeys, tile.layer);
      place.advance();
    }
  }
}

// The warpgroups' turns, by named barriers of the block: each waits at its own, and calls the next one to its.
template <class A> struct Turns {
  int warpgroup;
  WS_INLINE void take() const {
    if constexpr (A::kTurns) meet_at<256>(warpgroup + 1);
  }
  WS_INLINE void give() const {
    const int next = warpgroup + 1 == A::kWarpgroups ? 0 : warpgroup + 1;
    if constexpr (A::kTurns) arrive_at<256>(next + 1);
  }
};

// What a thread knows of its two rows: the score that weights are relative to, and the sum of its own weights.
struct OnlineSoftmax {
  float pivot[2] = {-infinity<float>(), -infinity<float>()};
  float total[2] = {0.0f, 0.0f};

  // Makes scores weights; `rescale` is what weights and sums of all tiles before are to be multiplied by: whether that is
  // not one, for some row of the warp. `to_log2` is the scale times log2(e). Scores of -inf, which have no finite pivot
  // yet, have weights of zero. `kFar`: scores may be so large that only their distance from the pivot can be multiplied.
  // `kApart`: a tile's weights are added up before they meet the tiles before.
  template <bool kFar, bool kApart = false, int kScores> WS_INLINE bool take(float (&scores)[kScores], float to_log2, float lag, float (&rescale)[2]) {
    bool moves = false;
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      float most = -infinity<float>();
#pragma unroll
      for (int i = 2 * lower; i < kScores; i += 4) most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      rescale[lower] = 1.0f;
      if ((most - pivot[lower]) * to_log2 > lag) {
        rescale[lower] = ptx::flushed_exp2((pivot[lower] - most) * to_log2);
        pivot[lower] = most;
        moves = true;
      }
      const float from = pivot[lower] == -infinity<float>() ? 0.0f : pivot[lower], shift = from * to_log2;
      const float before = total[lower] * rescale[lower];
      float sum = kApart ? 0.0f : before;
#pragma unroll
      for (int i = 2 * lower; i < kScores; i += 4) {
#pragma unroll
        for (int e = i; e < i + 2; ++e) {
          scores[e] = ptx::flushed_exp2(kFar ? (scores[e] - from) * to_log2 : scores[e] * to_log2 - shift);
          sum += scores[e];
        }
      }
      total[lower] = kApart ? before + sum : sum;
    }
    return __any_sync(0xffffffffu, moves);
  }

  // The sum of a row's weights, of all threads that hold some.
  WS_INLINE float whole(int lower) const {
    float sum = total[lower];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  }
  // Of a row, the natural logarithm of the sum of exponentials of its scores: infinite where it sees nothing, so that no
  // weight that is made of it counts.
  WS_INLINE float statistics(int lower, float to_log2) const {
    const float sum = whole(lower);
    return sum == 0.0f ? infinity<float>() : (pivot[lower] * to_log2 + log2f(sum)) * 0.6931471805599453f;
  }
  // One over it; zero for a row that sees nothing, as PyTorch has it.
  WS_INLINE float reciprocal(int lower) const {
    const float sum = whole(lower);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }
};

// A thread's part of a mask's tile, asked for before the scores are there.
template <class A> struct MaskTile {
  using M = typename A::Mask;
  using Element = typename M::Element;
  Pack<Element, 2> pairs[M::kIsGiven ? A::kScores / 2 : 1];

  static WS_INLINE int64 layer_at(int layer) {
    constexpr MaskSteps kSteps = M::kSteps;
    return kSteps.offset + layer / A::kInner * kSteps.outer + layer % A::kInner / A::kGroup * kSteps.inner +
           layer % A::kInner % A::kGroup * kSteps.member;
  }

  // Some of the pairs. `row` is the upper of the thread's rows. What lies outside is read at the last element inside, and
  // hidden later.
  template <int kBegin = 0, int kEnd = A::kScores / 2> WS_INLINE void load(const Element* __restrict__ mask, int layer, int row, int step) {
    if constexpr (M::kIsGiven) {
      constexpr MaskSteps kSteps = M::kSteps;
      mask += layer_at(layer);
      const int first = step * A::kTileKeys + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const int m = row + i % 2 * 8, key = first + i / 2 * 8;
        const Element* from = mask + (A::kM % A::kTileQueries ? min(m, A::kM - 1) : m) * kSteps.row;
        if constexpr (kSteps.pairs) {
          pairs[i] = ws::load<2, kShared>(from + (A::kKeys % A::kTileKeys ? min(key, A::kKeys - 2) : key));
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e) pairs[i][e] = from[min(key + e, A::kKeys - 1) * kSteps.key];
        }
      }
    }
  }

  // A score with what the mask says of it: floats are added in their own unit, and bools in any.
  static WS_INLINE float masked(float score, Element given, float scale) {
    if constexpr (!M::kIsAdded) return score + (given ? 0.0f : -infinity<float>());
    else if constexpr (sizeof(Element) == 4) return score * scale + given;
    else return score * scale + widen(given);
  }
  template <int kBegin = 0, int kEnd = A::kScores / 2> WS_INLINE void add_to(float (&scores)[A::kScores], float scale) const {
    if constexpr (M::kIsGiven) {
#pragma unroll
      for (int i = 2 * kBegin; i < 2 * kEnd; ++i) scores[i] = masked(scores[i], pairs[i / 2][i % 2], scale);
    }
  }
};

// Scores of keys that a row does not see count for nothing: those beyond the last, and causal ones after its own number.
// `row` is the upper of the thread's rows.
template <class A> WS_INLINE void hide(float (&scores)[A::kScores], int step, int row) {
#pragma unroll
  for (int i = 0; i < A::kScores; ++i) {
    const int key = step * A::kTileKeys + i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2;
    if (key >= (A::kCausal ? min(A::kKeys, row + i / 2 % 2 * 8 + 1) : A::kKeys)) scores[i] = -infinity<float>();
  }
}
// Whether some row of the warpgroup's, the first of which is `first`, does not see the step's last key.
template <class A> WS_INLINE bool is_hidden(int step, int first) {
  const int last = (step + 1) * A::kTileKeys - 1;
  return (A::kKeys % A::kTileKeys && last >= A::kKeys) || (A::kCausal && last > first);
}

template <class A> WS_INLINE void round_weights(const float (&scores)[A::kScores], unsigned (&weights)[A::kScores / 2]) {
#pragma unroll
  for (int i = 0; i < A::kScores / 2; ++i)
    weights[i] = rounded_pair<typename A::Element>(scores[2 * i], scores[2 * i + 1]);
}

template <class A>
WS_INLINE void multiply_keys(float (&scores)[A::kScores], const AttentionTiles<A>& shared, int warpgroup, int stage) {
#pragma unroll
  for (int k = 0; k < A::kDepth; k += 16)
    multiply_add<typename A::Element, kAlong, kAlong>(
        scores, further<kAlong>(operand_at<kAlong>(shared.queries[k / 64] + warpgroup * A::kOwnRows * 64), k % 64),
        further<kAlong>(operand_at<kAlong>(shared.keys[stage][k / 64]), k % 64), k > 0);
}

template <class A>
WS_INLINE void multiply_values(float (&sums)[A::kSums], const unsigned (&weights)[A::kScores / 2],
                               const AttentionTiles<A>& shared, int stage, int keep) {
  const uint64 values = operand_at<kAcross, A::kTileKeys>(shared.values[stage][0]);
#pragma unroll
  for (int n = 0; n < A::kTileKeys; n += 16)
    multiply_add_held<typename A::Element, kAcross>(sums, weights + n / 4, further<kAcross>(values, n), keep + n > 0);
}

// Where a backward needs no rows' statistics. Others are functions of (layer, row, value).
struct NoStatistics {
  static constexpr bool kAreKept = false;
};

// The sums of a tile's 64 rows; what lies in `place` moves on by the steps taken.
// `scale` is that of scores where a mask is added to them, else times log2(e).
template <class A, class Keep>
WS_INLINE void attend(AttentionTiles<A>& shared, RingPlace<A::kStages>& place, const Turns<A>& turns,
                      const typename A::QueryTile& tile, float scale, const typename A::Mask::Element* __restrict__ mask,
                      float (&sums)[A::kSums], const Keep& keep) {
  // A score of 1e8 times log2(e) is off by up to 2^5: of all its row's weights alike, which halves have no range for.
  constexpr bool kFar = A::Mask::kIsAdded || kIsHalf<typename A::Element>;
  const float to_log2 = A::Mask::kIsAdded ? 1.4426950408889634f : scale;
  const int warpgroup = turns.warpgroup, first = tile.first_row() + A::kOwnRows * warpgroup;
  const int row = first + 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4, steps = tile.steps();
  OnlineSoftmax softmax;
  MaskTile<A> masked;
  float scores[A::kScores], rescale[2];
  unsigned weights[A::kScores / 2];
  shared.keys_filled[place.stage].wait(place.parity);
  turns.take();
  products_begin();
  multiply_keys<A>(scores, shared, warpgroup, place.stage);
  products_commit();
  turns.give();
  masked.load(mask, tile.layer, row, 0);
  products_wait<0>();
  settle(scores);
  release<A>(shared.keys_free[place.stage]);
  masked.add_to(scores, scale);
  if (is_hidden<A>(0, first)) hide<A>(scores, 0, row);
  softmax.take<kFar>(scores, to_log2, A::kLag, rescale);
  round_weights<A>(scores, weights);
  shared.values_filled[place.stage].wait(place.parity);
  RingPlace<A::kStages> previous = place;
  place.advance();
  for (int step = 1; step < steps; ++step) {
    shared.keys_filled[place.stage].wait(place.parity);
    turns.take();
    products_begin();
    multiply_keys<A>(scores, shared, warpgroup, place.stage);
    products_commit();
    multiply_values<A>(sums, weights, shared, previous.stage, step - 1);
    products_commit();
    turns.give();
    masked.load(mask, tile.layer, row, step);
    products_wait<1>();  // the scores; the sums run on
    settle(scores);
    release<A>(shared.keys_free[place.stage]);
    masked.add_to(scores, scale);
    if (is_hidden<A>(step, first)) hide<A>(scores, step, row);
    const bool moves = softmax.take<kFar>(scores, to_log2, A::kLag, rescale);
    settle(scores);
    // The next step's, waited for here: a branch, before which the assembler leaves the exponentials, where it would
    // move them behind a mere wait for the sums, and nothing would run beside that product.
    shared.values_filled[place.stage].wait(place.parity);
    products_wait<0>();
    settle(sums);
    settle(weights);
    release<A>(shared.values_free[previous.stage]);
    if (moves) {
#pragma unroll
      for (int i = 0; i < A::kSums; ++i) sums[i] *= rescale[i / 2 % 2];
    }
    round_weights<A>(scores, weights);
    previous = place;
    place.advance();
  }
  release<A>(shared.queries_free);
  products_begin();
  multiply_values<A>(sums, weights, shared, previous.stage, steps - 1);
  products_commit();
  const float reciprocals[2] = {softmax.reciprocal(0), softmax.reciprocal(1)};
  if constexpr (Keep::kAreKept) {
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float statistics = softmax.statistics(lower, to_log2);
      if (threadIdx.x % 4 == 0 && row + 8 * lower < A::kM) keep(tile.layer, row + 8 * lower, statistics);
    }
  }
  products_wait<0>();
  settle(sums);
  settle(weights);
  release<A>(shared.values_free[previous.stage]);
#pragma unroll
  for (int i = 0; i < A::kSums; ++i) sums[i] *= reciprocals[i / 2 % 2];
}

// Sets up the rings; one warp copies, and each warpgroup that multiplies calls `attend(shared, place, turns, tile, sums)` for
// tile after tile. `finish(layer, m, d, sums)` is as `multiply` has it.
template <class A, class Attend, class Finish>
WS_INLINE void with_query_tiles(const TensorMap& queries, const TensorMap& keys, const TensorMap& values,
                                const Attend& attend, const Finish& finish) {
  extern __shared__ char memory[];
  AttentionTiles<A>& shared =
      *reinterpret_cast<AttentionTiles<A>*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    prefetch_map(queries);
    prefetch_map(keys);
    prefetch_map(values);
    shared.queries_filled.begin(1);
    shared.queries_free.begin(4 * A::kWarpgroups);
    for (int i = 0; i < A::kStages; ++i) {
      shared.keys_filled[i].begin(1);
      shared.keys_free[i].begin(4 * A::kWarpgroups);
      shared.values_filled[i].begin(1);
      shared.values_free[i].begin(4 * A::kWarpgroups);
    }
    publish_barriers();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128 - 1;
  if (warpgroup < 0) {
    keep_registers<A::kCopyingRegisters>();
    if (threadIdx.x == 0) copy_attention<A>(shared, queries, keys, values);
    return;
  }
  take_registers<A::kRegisters>();
  const Turns<A> turns{warpgroup};
  if (warpgroup == A::kWarpgroups - 1) turns.give();  // the first one may begin
  RingPlace<A::kStages> place;
  int parity = 0;
  for (int number = blockIdx.x; number < A::kTiles; number += gridDim.x) {
    float sums[A::kSums];
    shared.queries_filled.wait(parity);
    parity ^= 1;
    const typename A::QueryTile tile = A::tile_at(number);
    attend(shared, place, turns, tile, sums);
    const typename A::Tile rows{tile.layer, tile.first_row() + A::kOwnRows * warpgroup};
    finish_tile<A>({rows, 0, 0}, sums, nullptr, nullptr, finish);
  }
}

// The whole of attention.
template <class A, class Finish, class Keep = NoStatistics>
WS_INLINE void attention(const TensorMap& queries, const TensorMap& keys, const TensorMap& values, float scale,
                         const typename A::Mask::Element* __restrict__ mask, const Finish& finish, const Keep& keep = {}) {
  with_query_tiles<A>(
      queries, keys, values,
      [&](AttentionTiles<A>& shared, RingPlace<A::kStages>& place, const Turns<A>& turns,
          const typename A::QueryTile& tile, float (&sums)[A::kSums]) {
        attend<A>(shared, place, turns, tile, scale, mask, sums, keep);
      },
      finish);
}

}  // namespace ws
