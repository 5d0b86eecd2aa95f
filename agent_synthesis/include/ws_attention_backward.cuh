// Attention's derivatives, for sm_90a: with P the softmax of scores S = scale * Q K^T + mask, made again from each row's
// logarithm of the sum of exponentials, and delta the rows' sums of dO * O,
//   dV = P^T dO,  dS = P * (dO V^T - delta),  dK = scale * dS^T Q,  dQ = scale * dS K
// (FlashAttention-2, arXiv 2307.08691, algorithm 2; FlashAttention-3, arXiv 2407.08608, for tensor cores that are asynchronous).
//
// A block takes a tile of keys and walks the queries that see it, of all heads that share it. Two warpgroups have half its keys
// each: transposed scores, and the derivatives of keys and values, never leave registers. dS meets in shared memory, where both
// make a half of dQ of it. So each product is made once, and what costs is adding up dQ over the tiles of keys, which other
// blocks have: in floats, in the second-level cache, one after the other in an order that is fixed (a counter for each tile
// of queries says whose turn it is), so that bits repeat. A second kernel by tiles of queries would need no order, but two of
// five products again. Blocks visit tiles of queries in an order in which turns come as they are needed.
#pragma once
#include "ws_attention.cuh"

namespace ws {

// `layers` is heads of queries times batch, `inner` heads of queries, of which `group` neighbours share keys and values.
struct AttentionBackwardExtents {
  int layers, inner, group, queries, keys, depth;
  bool causal;
};
// `stages` of tiles of queries, `blocks` that run at the same time.
struct AttentionBackwardTiling {
  int stages, blocks;
};
// Elements from one outer layer, head and row to the next.
struct RowSteps {
  int64 outer, inner, row;
  WS_INLINE int64 of_layer(int number, int heads) const { return number / heads * outer + number % heads * inner; }
};

template <class Element_, AttentionBackwardExtents kExtents, AttentionBackwardTiling kTiling, class Mask_ = NoMask>
struct AttentionBackward {
  using Element = Element_;
  using Mask = Mask_;
  static constexpr int kLayers = kExtents.layers, kInner = kExtents.inner, kGroup = kExtents.group;
  static constexpr int kPieces = 1, kCluster = 1;
  static constexpr int kM = kExtents.queries, kKeys = kExtents.keys, kDepth = kExtents.depth;
  static constexpr bool kCausal = kExtents.causal;
  static constexpr int kStages = kTiling.stages, kBlocks = kTiling.blocks;
  static constexpr int kDepthBlocks = (kDepth + 63) / 64;
  static constexpr int kTileKeys = 128, kOwnKeys = 64, kTileQueries = kDepthBlocks == 1 ? 128 : 64;
  static constexpr int kQueryBlocks = kTileQueries / 64;
  static constexpr bool kIsNarrow = kDepthBlocks == 1;
  static constexpr int kQueryTiles = (kM + kTileQueries - 1) / kTileQueries;
  static constexpr int kKeyTiles = (kKeys + kTileKeys - 1) / kTileKeys;
  static constexpr int kTiles = kKeyTiles * (kLayers / kGroup);
  static_assert(int64(kQueryTiles + 1) * (kKeyTiles + 1) < 1LL << 31, "places are counted in 32 bits");
  // Of a thread: scores, sums of either derivative by keys, and a half of a tile of dQ, which is 64 by 64.
  static constexpr int kScores = kTileQueries / 2, kSums = 32 * kDepthBlocks, kPart = 32;
  static constexpr int kPartFloats = 64 * 64;
  static constexpr int kThreads = 384, kRegisters = 232, kCopyingRegisters = 40;
  // Blocks of one layer begin at tiles of queries that are apart where all of them run at once.
  static constexpr bool kRotates = !kCausal && kKeyTiles <= kBlocks;
  static constexpr int kLayersAtOnce = kBlocks / kKeyTiles > 0 ? kBlocks / kKeyTiles : 1;

  // A tile of keys, and in which order it meets queries and gives to dQ. No tile waits for one of a greater number, unless
  // they run at the same time, and go round.
  struct KeyTile {
    int layer, tile;  // `layer` of keys
    bool ascends;
    WS_INLINE int first_key() const { return tile * kTileKeys; }
    // Where a tile of keys begins among those of queries.
    static WS_INLINE int beginning(int tile) {
      if constexpr (kRotates) return static_cast<unsigned>(tile * kQueryTiles) / kKeyTiles;
      else return kCausal ? min(kQueryTiles, tile * kTileKeys / kTileQueries) : 0;
    }
    WS_INLINE int first_tile() const { return beginning(tile) == kQueryTiles ? 0 : beginning(tile); }
    static WS_INLINE int next(int queries) { return kRotates && queries + 1 == kQueryTiles ? 0 : queries + 1; }
    WS_INLINE int steps() const { return kCausal ? kQueryTiles - beginning(tile) : kQueryTiles; }
    // In how many steps, from the first on, it gives to dQ before all others.
    WS_INLINE int first_turns() const {
      if constexpr (kRotates || kCausal) {
        if (!kCausal || !ascends) return (tile + 1 < kKeyTiles ? beginning(tile + 1) : kQueryTiles) - beginning(tile);
      }
      return tile == 0 ? kQueryTiles : 0;
    }
    // How many give to dQ of a tile of queries before this one does. Those that go round come as they meet it: the last that
    // begins at it or before first, then those with lesser numbers, and then from the greatest down.
    WS_INLINE int turn(int queries) const {
      if constexpr (kRotates) {
        const int begun = min(kKeyTiles, static_cast<int>((unsigned(queries + 1) * kKeyTiles + kQueryTiles - 1) / kQueryTiles));
        return tile < begun ? begun - 1 - tile : begun + kKeyTiles - 1 - tile;
      } else if constexpr (kCausal) {
        return ascends ? tile : min(kKeyTiles - 1, ((queries + 1) * kTileQueries - 1) / kTileKeys) - tile;
      } else {
        return tile;
      }
    }
  };
  // Causal tiles are the shorter the later their keys: of layers that follow each other on the same blocks, one begins with
  // the last and one with the first, so that blocks have the same to do, and wait for no turn.
  static WS_INLINE KeyTile tile_at(int number) {
    const int layer = number / kKeyTiles, place = number % kKeyTiles;
    const bool ascends = !kCausal || layer / kLayersAtOnce % 2;
    return {layer, ascends ? place : kKeyTiles - 1 - place, ascends};
  }
  // A thread of a warpgroup has these rows of a result, and 8 more.
  static WS_INLINE int own_row() { return 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4; }
};

// Blocks of 64 elements, each a box of the copy engine's. `changes`: dS, across; of two steps by turns, so that one meeting a
// step will do. `statistics`: of queries, what their scores are above, base 2, and delta.
template <class A> struct alignas(1024) AttentionBackwardTiles {
  typename A::Element keys[A::kDepthBlocks][A::kTileKeys * 64];
  typename A::Element values[A::kDepthBlocks][A::kTileKeys * 64];
  typename A::Element queries[A::kStages][A::kDepthBlocks][A::kTileQueries * 64];
  typename A::Element gradients[A::kStages][A::kDepthBlocks][A::kTileQueries * 64];
  typename A::Element changes[2][A::kQueryBlocks][A::kTileKeys * 64];
  float statistics[A::kStages][2][A::kTileQueries];
  Barrier keys_filled, keys_free;
  Barrier filled[A::kStages], free[A::kStages];
};

// Barriers of the block by number: a warpgroup's turn at dQ has come, it has given what it has, dS is there.
enum BackwardBarrier { kTurnCame = 1, kTurnOver = 3, kChangesThere = 5 };

template <class A>
WS_INLINE void copy_for_backward(AttentionBackwardTiles<A>& shared, const TensorMap& queries, const TensorMap& keys,
                                 const TensorMap& values, const TensorMap& gradients, const float* __restrict__ statistics) {
  RingPlace<A::kStages> place;
  int parity = 0;
  for (int number = blockIdx.x; number < A::kTiles; number += gridDim.x) {
    const typename A::KeyTile tile = A::tile_at(number);
    const int steps = tile.steps();
    shared.keys_free.wait(parity ^ 1);
    copy_tile<A, A::kGroup>(keys, shared.keys_filled, shared.keys, 0, tile.first_key(), tile.layer * A::kGroup);
    copy_tile<A, A::kGroup>(values, shared.keys_filled, shared.values, 0, tile.first_key(), tile.layer * A::kGroup);
    parity ^= 1;
    for (int member = 0; member < A::kGroup; ++member) {
      const int layer = tile.layer * A::kGroup + member;
      int number_of_tile = tile.first_tile();
#pragma unroll 1
      for (int step = 0; step < steps; ++step, number_of_tile = tile.next(number_of_tile)) {
        const int stage = place.stage, row = number_of_tile * A::kTileQueries;
        shared.free[stage].wait(place.parity ^ 1);
        copy_tile<A, 1>(queries, shared.filled[stage], shared.queries[stage], 0, row, layer);
        copy_tile<A, 1>(gradients, shared.filled[stage], shared.gradients[stage], 0, row, layer);
        shared.filled[stage].expect(sizeof(shared.statistics[stage]));
        copy_bytes(shared.filled[stage], shared.statistics[stage],
                   statistics + (int64(layer) * A::kQueryTiles + number_of_tile) * 2 * A::kTileQueries,
                   sizeof(shared.statistics[stage]));
        place.advance();
      }
    }
  }
}

// For one warp: says when the warpgroup's turn has come, and tells the others when it is over.
template <class A> WS_INLINE void keep_turns(unsigned* counters, int warpgroup) {
  for (int number = blockIdx.x; number < A::kTiles; number += gridDim.x) {
    const typename A::KeyTile tile = A::tile_at(number);
    const int steps = tile.steps();
    for (int member = 0; member < A::kGroup; ++member) {
      int queries = tile.first_tile();
#pragma unroll 1
      for (int step = 0; step < steps; ++step, queries = tile.next(queries)) {
        unsigned* counter = counters + ((int64(tile.layer) * A::kGroup + member) * A::kQueryTiles + queries) * 2 + warpgroup;
        const unsigned turn = tile.turn(queries);
        if (threadIdx.x % 32 == 0) {
          while (ptx::load_acquire(counter) < turn) {}
        }
        __syncwarp();
        arrive_at<160>(kTurnCame + warpgroup);
        meet_at<160>(kTurnOver + warpgroup);
        if (threadIdx.x % 32 == 0) ptx::count_release(counter);
      }
    }
  }
}

// Transposed scores, or what their derivatives are made of: 64 rows by a tile of queries.
template <class A>
WS_INLINE void multiply_by_queries(float (&to)[A::kScores], const typename A::Element (&rows)[A::kDepthBlocks][A::kTileKeys * 64],
                                   const typename A::Element (&queries)[A::kDepthBlocks][A::kTileQueries * 64], int warpgroup) {
#pragma unroll
  for (int k = 0; k < A::kDepth; k += 16)
    multiply_add<typename A::Element, kAlong, kAlong>(
        to, further<kAlong>(operand_at<kAlong>(rows[k / 64] + warpgroup * A::kOwnKeys * 64), k % 64),
        further<kAlong>(operand_at<kAlong>(queries[k / 64]), k % 64), k > 0);
}

// Adds a product over the tile's queries to a derivative by keys.
template <class A>
WS_INLINE void add_over_queries(float (&sums)[A::kSums], const unsigned (&weights)[A::kScores / 2],
                                const typename A::Element (&queries)[A::kDepthBlocks][A::kTileQueries * 64]) {
  const uint64 operand = operand_at<kAcross, A::kTileQueries>(queries[0]);
#pragma unroll
  for (int n = 0; n < A::kTileQueries; n += 16)
    multiply_add_held<typename A::Element, kAcross>(sums, weights + n / 4, further<kAcross>(operand, n), 1);
}

// Sixty-four rows by sixty-four columns of dQ, over all keys of the tile: a half of the rows, or else of the columns.
template <class A>
WS_INLINE void multiply_changes(float (&part)[A::kPart], const AttentionBackwardTiles<A>& shared, int buffer, int warpgroup) {
  constexpr bool kByRows = A::kQueryBlocks == 2;
  const uint64 changes = operand_at<kAcross, A::kTileKeys>(shared.changes[buffer][kByRows ? warpgroup : 0]);
  const uint64 keys = operand_at<kAcross, A::kTileKeys>(shared.keys[kByRows ? 0 : warpgroup]);
#pragma unroll
  for (int n = 0; n < A::kTileKeys; n += 16)
    multiply_add<typename A::Element, kAcross, kAcross>(part, further<kAcross>(changes, n), further<kAcross>(keys, n), n > 0);
}

// A thread's place in a tile of transposed scores: key `key` (and 8 further), query `query` + 8 * (i / 4) + i % 2 of element i.
template <class A> struct BackwardThread {
  int warpgroup, key, query;
  WS_INLINE explicit BackwardThread(int warpgroup_)
      : warpgroup(warpgroup_), key(warpgroup_ * A::kOwnKeys + A::own_row()), query(2 * (threadIdx.x % 4)) {}

  // Scores become weights. `scale` is that of scores where a mask is added to them, else times log2(e).
  WS_INLINE void weigh(float (&scores)[A::kScores], const float (&statistics)[2][A::kTileQueries], float scale,
                       const typename A::Mask::Element* __restrict__ mask, int layer, int first_query, int first_key) const {
    if constexpr (A::kKeys % A::kTileKeys != 0) {
      if (first_key + A::kTileKeys > A::kKeys) {
        const int beyond = A::kKeys - first_key - key;
#pragma unroll
        for (int i = 0; i < A::kScores; ++i) scores[i] = i / 2 % 2 * 8 >= beyond ? -infinity<float>() : scores[i];
      }
    }
    if (A::kCausal && first_key + A::kTileKeys - 1 > first_query) {
      const int after = first_query + query - first_key - key;
#pragma unroll
      for (int i = 0; i < A::kScores; ++i)
        scores[i] = i / 2 % 2 * 8 - i / 4 * 8 - i % 2 > after ? -infinity<float>() : scores[i];
    }
#pragma unroll
    for (int i = 0; i < A::kScores; ++i) {
      const int column = query + i / 4 * 8 + i % 2;
      float score = scores[i] * scale;
      if constexpr (A::Mask::kIsGiven) {
        constexpr MaskSteps kSteps = A::Mask::kSteps;
        const int m = min(first_query + column, A::kM - 1), n = min(first_key + key + i / 2 % 2 * 8, A::kKeys - 1);
        score = 1.4426950408889634f * (score + widen(mask[kSteps.offset + layer / A::kInner * kSteps.outer +
                                       layer % A::kInner * kSteps.inner + m * kSteps.row + n * kSteps.key]));
      }
      scores[i] = ptx::flushed_exp2(score - statistics[0][column]);
    }
  }
  // Weights and what `changes` hold become derivatives of scores, but for the scale.
  WS_INLINE void change(float (&changes)[A::kScores], const float (&weights)[A::kScores],
                        const float (&statistics)[2][A::kTileQueries]) const {
#pragma unroll
    for (int i = 0; i < A::kScores; ++i)
      changes[i] = weights[i] * (changes[i] - statistics[1][query + i / 4 * 8 + i % 2]);
  }
  // To where tensor cores take them from, in the copy engine's swizzle of 128 bytes.
  WS_INLINE void show(typename A::Element (&to)[A::kQueryBlocks][A::kTileKeys * 64],
                      const unsigned (&pairs)[A::kScores / 2]) const {
    unsigned swizzle[1] = {static_cast<unsigned>(key % 8 * 16)};
    settle(swizzle);  // places are worked out here: kept from step to step, they would not all find registers
#pragma unroll
    for (int i = 0; i < A::kScores / 2; ++i) {
      const int column = query + i / 2 * 8, row = key + i % 2 * 8;
      char* block = reinterpret_cast<char*>(to[column / 64]);
      *reinterpret_cast<unsigned*>(block + row * 128 + (column % 64 * 2 ^ swizzle[0])) = pairs[i];
    }
  }
  // A part of dQ to where it is added up, as it lies in registers.
  WS_INLINE void give(float4* sums, const float (&part)[A::kPart], bool is_first) const {
    float4* to = sums + warpgroup * (A::kPartFloats / 4) + threadIdx.x % 128;
    if (is_first) {
#pragma unroll
      for (int i = 0; i < A::kPart / 4; ++i) to[128 * i] = four_of(part, i);
    } else {
#pragma unroll
      for (int i = 0; i < A::kPart / 4; ++i) ptx::add_floats(to + 128 * i, four_of(part, i));
    }
  }
  static WS_INLINE float4 four_of(const float (&part)[A::kPart], int i) {
    return float4{part[4 * i], part[4 * i + 1], part[4 * i + 2], part[4 * i + 3]};
  }
  // A derivative by keys, in the operands' type.
  WS_INLINE void store(typename A::Element* __restrict__ to, const RowSteps& steps, const float (&sums)[A::kSums], float scale,
                       int layer, int first_key) const {
    to += steps.of_layer(layer, A::kInner / A::kGroup);
#pragma unroll
    for (int i = 0; i < A::kSums; i += 2) {
      const int column = query + i / 4 * 8, row = first_key + key + i / 2 % 2 * 8;
      if (row < A::kKeys && column < A::kDepth)
        *reinterpret_cast<unsigned*>(to + row * steps.row + column) =
            rounded_pair<typename A::Element>(sums[i] * scale, sums[i + 1] * scale);
    }
  }
};

template <class A> struct BackwardResults {
  typename A::Element *keys, *values;
  RowSteps key_steps, value_steps;
  float4* sums;  // of dQ: tile by tile of each layer
};

template <class A> WS_INLINE void round_pairs(const float (&numbers)[A::kScores], unsigned (&pairs)[A::kScores / 2]) {
#pragma unroll
  for (int i = 0; i < A::kScores / 2; ++i)
    pairs[i] = rounded_pair<typename A::Element>(numbers[2 * i], numbers[2 * i + 1]);
}

// The derivatives of tiles of keys and values, for one of two warpgroups.
template <class A> struct Derivation {
  AttentionBackwardTiles<A>& shared;
  const typename A::Mask::Element* __restrict__ mask;
  const BackwardResults<A>& results;
  BackwardThread<A> thread;
  RingPlace<A::kStages> place;
  int buffer = 0;
  // What a step leaves of dQ goes to memory in the next one, while tensor cores make scores: to where, and whether it is the
  // first there.
  float4* given_to = nullptr;
  bool is_first = false;

  WS_INLINE void give(const float (&part)[A::kPart]) {
    if (given_to == nullptr) return;
    meet_at<160>(kTurnCame + thread.warpgroup);
    thread.give(given_to, part, is_first);
    arrive_at<160>(kTurnOver + thread.warpgroup);
    given_to = nullptr;
  }

  // One tile of queries. Nothing that tensor cores do outlives it.
  WS_INLINE void take(float (&of_keys)[A::kSums], float (&of_values)[A::kSums], float (&part)[A::kPart],
                      const typename A::KeyTile& tile, int layer, int queries, float scale, float scale_of_scores) {
    const int stage = place.stage;
    const auto& statistics = shared.statistics[stage];
    float scores[A::kScores], changes[A::kScores], changed[A::kPart];
    unsigned weights[A::kScores / 2], rounded[A::kScores / 2];
    shared.filled[stage].wait(place.parity);
    products_begin();
    multiply_by_queries<A>(scores, shared.keys, shared.queries[stage], thread.warpgroup);
    products_commit();
    give(part);
    products_begin();
    multiply_by_queries<A>(changes, shared.values, shared.gradients[stage], thread.warpgroup);
    products_commit();
    products_wait<1>();  // the scores
    settle(scores);
    thread.weigh(scores, statistics, scale_of_scores, mask, layer, queries * A::kTileQueries, tile.first_key());
    // The values' product runs beside the changes of scores where both and what it reads find room in registers.
    if constexpr (!A::kIsNarrow) {
      round_pairs<A>(scores, weights);
      products_begin();
      add_over_queries<A>(of_values, weights, shared.gradients[stage]);
      products_commit();
    }
    products_wait<A::kIsNarrow ? 0 : 1>();  // what changes of scores are made of
    settle(changes);
    thread.change(changes, scores, statistics);
    round_pairs<A>(changes, rounded);
    if constexpr (A::kIsNarrow) round_pairs<A>(scores, weights);
    thread.show(shared.changes[buffer], rounded);
    publish_writes();
    products_begin();
    if constexpr (A::kIsNarrow) add_over_queries<A>(of_values, weights, shared.gradients[stage]);
    add_over_queries<A>(of_keys, rounded, shared.queries[stage]);
    products_commit();
    meet_at<256>(kChangesThere);
    products_begin();
    multiply_changes<A>(changed, shared, buffer, thread.warpgroup);
    products_commit();
    products_wait<0>();
    settle(of_values);
    settle(of_keys);
    settle(changed);
    settle(weights);
    settle(rounded);
    // Scaled here: what a product has written the assembler would not let go to memory while another one runs.
#pragma unroll
    for (int i = 0; i < A::kPart; ++i) part[i] = changed[i] * scale;
    release<A>(shared.free[stage]);
    place.advance();
    buffer ^= 1;
  }

  WS_INLINE void run(const typename A::KeyTile& tile, float scale, float scale_of_scores) {
    const int steps = tile.steps(), first_turns = tile.first_turns();
    float of_keys[A::kSums], of_values[A::kSums], part[A::kPart];
#pragma unroll
    for (int i = 0; i < A::kSums; ++i) of_keys[i] = of_values[i] = 0.0f;
    // One loop for all heads: two would cost registers.
    int layer = tile.layer * A::kGroup, queries = tile.first_tile(), step = 0;
#pragma unroll 1
    for (int left = steps * A::kGroup; left > 0; --left) {
      take(of_keys, of_values, part, tile, layer, queries, scale, scale_of_scores);
      given_to = results.sums + (int64(layer) * A::kQueryTiles + queries) * 2 * (A::kPartFloats / 4);
      is_first = step < first_turns;
      queries = tile.next(queries);
      if (++step == steps) step = 0, queries = tile.first_tile(), ++layer;
    }
    release<A>(shared.keys_free);
    give(part);
    thread.store(results.keys, results.key_steps, of_keys, scale, tile.layer, tile.first_key());
    thread.store(results.values, results.value_steps, of_values, 1.0f, tile.layer, tile.first_key());
  }
};

// All of it but what comes before (`attention_statistics`) and behind (`store_query_gradients`).
template <class A>
WS_INLINE void attention_backward(const TensorMap& queries, const TensorMap& keys, const TensorMap& values,
                                  const TensorMap& gradients, float scale, float scale_of_scores,
                                  const typename A::Mask::Element* __restrict__ mask, const float* __restrict__ statistics,
                                  const BackwardResults<A>& results, unsigned* counters) {
  extern __shared__ char memory[];
  AttentionBackwardTiles<A>& shared =
      *reinterpret_cast<AttentionBackwardTiles<A>*>((reinterpret_cast<uint64>(memory) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    prefetch_map(queries);
    prefetch_map(keys);
    prefetch_map(values);
    prefetch_map(gradients);
    shared.keys_filled.begin(2);
    shared.keys_free.begin(8);
    for (int i = 0; i < A::kStages; ++i) {
      shared.filled[i].begin(3);
      shared.free[i].begin(8);
    }
    publish_barriers();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128 - 1;
  if (warpgroup < 0) {
    keep_registers<A::kCopyingRegisters>();
    const int warp = threadIdx.x / 32;
    if (warp == 1 || warp == 2) keep_turns<A>(counters, warp - 1);
    else if (threadIdx.x == 0) copy_for_backward<A>(shared, queries, keys, values, gradients, statistics);
    return;
  }
  take_registers<A::kRegisters>();
  Derivation<A> derivation{shared, mask, results, BackwardThread<A>(warpgroup)};
  int parity = 0;
  for (int number = blockIdx.x; number < A::kTiles; number += gridDim.x) {
    shared.keys_filled.wait(parity);
    parity ^= 1;
    derivation.run(A::tile_at(number), scale, scale_of_scores);
  }
}

// Of each row of queries what its scores are above, base 2, and the sum of its products of result and gradient; of rows beyond
// the last, what makes all their weights zero. A few threads have a row.
template <class A>
WS_INLINE void attention_statistics(const typename A::Element* __restrict__ results, const RowSteps& result_steps,
                                    const typename A::Element* __restrict__ gradients, const RowSteps& gradient_steps,
                                    const float* __restrict__ logsumexp, const RowSteps& logsumexp_steps,
                                    float* __restrict__ statistics) {
  constexpr int kLanes = A::kDepth <= 64 ? 8 : 16, kRows = A::kQueryTiles * A::kTileQueries;
  const int64 row = (int64(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes;
  const int layer = static_cast<int>(row / kRows), m = static_cast<int>(row % kRows), lane = threadIdx.x % kLanes;
  const bool is_inside = layer < A::kLayers && m < A::kM;
  float sum = 0.0f;
  if (is_inside && 8 * lane < A::kDepth) {
    results += result_steps.of_layer(layer, A::kInner) + m * result_steps.row;
    gradients += gradient_steps.of_layer(layer, A::kInner) + m * gradient_steps.row;
    const auto result = load<8, kOnce>(results + 8 * lane);
    const auto gradient = load<8, kShared>(gradients + 8 * lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += widen(result[e]) * widen(gradient[e]);
  }
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (lane != 0 || layer >= A::kLayers) return;
  float above = infinity<float>();
  if (is_inside) {
    const float given = logsumexp[logsumexp_steps.of_layer(layer, A::kInner) + m * logsumexp_steps.row];
    if (given != -infinity<float>()) above = given * 1.4426950408889634f;
  }
  float* to = statistics + (int64(layer) * A::kQueryTiles + m / A::kTileQueries) * 2 * A::kTileQueries + m % A::kTileQueries;
  to[0] = above;
  to[A::kTileQueries] = sum;
}

// dQ of a tile of queries, a block's, from where it was added up; its counters are zero again.
template <class A>
WS_INLINE void store_query_gradients(const float4* __restrict__ sums, unsigned* counters,
                                     typename A::Element* __restrict__ to, const RowSteps& steps) {
  const int layer = blockIdx.x / A::kQueryTiles, first = blockIdx.x % A::kQueryTiles * A::kTileQueries;
  const int half = threadIdx.x / 128;
  constexpr bool kByRows = A::kQueryBlocks == 2;
  if (threadIdx.x < 2) counters[blockIdx.x * 2 + threadIdx.x] = 0;
  sums += (int64(blockIdx.x) * 2 + half) * (A::kPartFloats / 4) + threadIdx.x % 128;
  to += steps.of_layer(layer, A::kInner);
#pragma unroll
  for (int i = 0; i < A::kPart / 4; ++i) {
    const float4 four = sums[128 * i];
    const int column = 8 * i + 2 * (threadIdx.x % 4) + (kByRows ? 0 : 64 * half);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const int row = first + (kByRows ? 64 * half : 0) + A::own_row() + 8 * lower;
      const float one = lower ? four.z : four.x, other = lower ? four.w : four.y;
      if (row < A::kM && column < A::kDepth)
        *reinterpret_cast<unsigned*>(to + row * steps.row + column) = rounded_pair<typename A::Element>(one, other);
    }
  }
}

}  // namespace ws
