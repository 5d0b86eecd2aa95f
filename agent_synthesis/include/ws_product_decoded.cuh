// A product of few rows with a weight that is computed from what lies in memory (quantised, scaled, of another type):
// sums[m, n] = sum over k of left[m, k] * weight(n, k), in 16 bits on tensor cores.
//
// Reading the weight is the work, so each of its elements is read once, and computed in the registers in which it is multiplied.
// A warp takes 16 rows of the weight as the rows of its products, and the left's rows, by eights, as their columns. The order of the
// depth is free in a sum: four lanes take neighbouring vectors of a row, of which each product has four elements a lane, and
// the left's are read in the same order. The warps of a block share the depth. The weight is the generated struct Weight's:
//
//   Loads                        List of the vectors that are loaded
//   kAcross                      rows of a vector where the weight lies across the depth, else 0
//   load(VectorLoad<k>, at, j)   the k-th of them, from element j of the depth (or row j) on
//   decode(at, j, …)             gets the loaded vectors in order, and gives a Pack of elements
//
// `at` holds the layer of the batch and the row (or the place along the depth). Across, a lane reads as many rows at each place of
// its vector of the left, and pairs neighbours of the depth in registers: rows of a tile are counted by the lane's.
#pragma once
#include "ws_product_shape.cuh"
#include "ws_vectors.cuh"

namespace ws {

// `rows` of the weight in a block's tile; `warps`; steps whose loads are under way; elements of a vector.
struct DecodedTiling {
  int rows, warps, ahead, width;
};

WS_INLINE void multiply_16(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2], bfloat16) {
  ptx::multiply_bfloat16(sums, left, right);
}
WS_INLINE void multiply_16(float (&sums)[4], const unsigned (&left)[4], const unsigned (&right)[2], half) {
  ptx::multiply_half(sums, left, right);
}

// A vector in the type that is multiplied: floats of 8 bits are not it yet.
template <class Element, class T, int kWidth> WS_INLINE Pack<Element, kWidth> in_element(const Pack<T, kWidth>& vector) {
  if constexpr (sizeof(T) == sizeof(Element)) {
    return vector;
  } else {
    Pack<Element, kWidth> made;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) made[e] = narrow<Element>(widen(vector[e]));
    return made;
  }
}

// `Left`: what the left has in memory.
template <class P, class Weight, class Left, Operand kLeft, DecodedTiling kTiling> struct DecodedProduct {
  using Element = typename P::Element;
  using Vector = Pack<Element, kTiling.width>;
  using Loads = typename Weight::Loads;
  static constexpr int kWidth = kTiling.width, kStep = 4 * kWidth;  // elements of the depth: of a lane, and of a warp
  static constexpr int kAcross = Weight::kAcross;
  using Decoded = Pack<Element, kAcross ? kAcross : kWidth>;
  static_assert(kAcross == 0 || 8 * kAcross == kTiling.rows, "eight lanes' rows are the tile's");
  static constexpr int kRowTiles = kTiling.rows / 16, kColumnTiles = (P::kM + 7) / 8, kColumns = 8 * kColumnTiles;
  static constexpr int kTiles = (P::kN + kTiling.rows - 1) / kTiling.rows;
  static constexpr int kThreads = 32 * kTiling.warps;
  static constexpr bool kIsWhole = P::kSlice * P::kSlices == P::kK && P::kSlice % kStep == 0;

  using Sums = float[kColumns][kTiling.rows];

  struct Step {
    Loads weight[kAcross ? 1 : kRowTiles][kAcross ? kWidth : 2];
    Pack<Left, kWidth> left[kColumnTiles];
    bool inside;
  };

  const Left* left;
  const Weight& weight;
  int batch, first, begin, vectors;  // the slice's first vector and how many it has
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  WS_INLINE DecodedProduct(const Left* operand, const Weight& given, int layer)
      : left(operand + Split<kLeft>::layer_at(layer)), weight(given), batch(layer / P::kSlices),
        first(blockIdx.x % kTiles * kTiling.rows), begin(layer % P::kSlices * (P::kSlice / kWidth)),
        vectors(P::depth_of(layer) / kWidth) {}

  // A row of the tile, as products have it.
  WS_INLINE int inside(int tile, int lower) const {
    return kAcross ? lane / 4 * kAcross + 2 * tile + lower : 16 * tile + 8 * lower + lane / 4;
  }
  WS_INLINE int row(int tile, int lower) const { return first + inside(tile, lower); }
  // The first of the rows that a lane reads across: whole vectors of them are there.
  WS_INLINE int first_across() const { return min(row(0, 0), P::kN - kAcross); }

  template <int k = 0> WS_INLINE void load(Loads& loads, const int (&at)[2], int j) const {
    if constexpr (k < Loads::kCount) {
      loads.template get<k>() = weight.load(VectorLoad<k>{}, at, j);
      load<k + 1>(loads, at, j);
    }
  }
  // `given` grows by the loaded vectors.
  template <int k = 0, class... Given>
  WS_INLINE Decoded decode(Loads& loads, const int (&at)[2], int j, const Given&... given) const {
    if constexpr (k < Loads::kCount) return decode<k + 1>(loads, at, j, given..., loads.template get<k>());
    else return weight.decode(at, j, given...);
  }

  // The lane's vector of a step of the warp; there may be none.
  WS_INLINE int vector(int number) const { return 4 * (number * kTiling.warps + warp) + lane % 4; }
  // The depth that it begins at, or the last vector.
  WS_INLINE int place(int number) const { return kWidth * (kIsWhole ? vector(number) : min(vector(number), vectors - 1)); }

  WS_INLINE void ask(Step& step, int number) const {
    const int k = place(number);
    step.inside = kIsWhole || vector(number) < vectors;
    if constexpr (kAcross) {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int at[2] = {batch, kWidth * begin + k + e};
        load(step.weight[0][e], at, first_across());
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int at[2] = {batch, min(row(tile, lower), P::kN - 1)};
          load(step.weight[tile][lower], at, kWidth * begin + k);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile)
      step.left[tile] = ws::load<kWidth, kShared>(left + min(8 * tile + lane / 4, P::kM - 1) * kLeft.row_stride + k);
  }

  WS_INLINE void multiply(float (&sums)[kRowTiles][kColumnTiles][4], Step& step, int number) const {
    const int k = kWidth * begin + place(number);
    const auto pair = [&](const Vector& vector, int i) { return step.inside ? reinterpret_cast<const unsigned*>(&vector)[i] : 0u; };
    Vector lefts_of[kColumnTiles];
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) lefts_of[column] = in_element<Element>(step.left[column]);
    if constexpr (kAcross) {
      Decoded rows[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        const int at[2] = {batch, k + e};
        rows[e] = decode(step.weight[0][e], at, first_across());
      }
      const auto both = [&](int e, int row) {
        return step.inside ? rows[e][row].bits | static_cast<unsigned>(rows[e + 1][row].bits) << 16 : 0u;
      };
#pragma unroll
      for (int i = 0; i < kWidth / 2; i += 2) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const int row = 2 * tile, e = 2 * i;
          const unsigned weights[4] = {both(e, row), both(e, row + 1), both(e + 2, row), both(e + 2, row + 1)};
#pragma unroll
          for (int column = 0; column < kColumnTiles; ++column) {
            const unsigned lefts[2] = {pair(lefts_of[column], i), pair(lefts_of[column], i + 1)};
            multiply_16(sums[tile][column], weights, lefts, Element{});
          }
        }
      }
    } else {
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        Decoded rows[2];
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int at[2] = {batch, min(row(tile, lower), P::kN - 1)};
          rows[lower] = decode(step.weight[tile][lower], at, k);
        }
#pragma unroll
        for (int i = 0; i < kWidth / 2; i += 2) {
          const unsigned weights[4] = {pair(rows[0], i), pair(rows[1], i), pair(rows[0], i + 1), pair(rows[1], i + 1)};
#pragma unroll
          for (int column = 0; column < kColumnTiles; ++column) {
            const unsigned lefts[2] = {pair(lefts_of[column], i), pair(lefts_of[column], i + 1)};
            multiply_16(sums[tile][column], weights, lefts, Element{});
          }
        }
      }
    }
  }

  // The warp's share of the depth.
  WS_INLINE void add(float (&sums)[kRowTiles][kColumnTiles][4]) const {
    const int steps = (vectors + 3) / 4, count = (steps - warp + kTiling.warps - 1) / kTiling.warps;
    Step ahead[kTiling.ahead];
#pragma unroll
    for (int s = 0; s < kTiling.ahead; ++s)
      if (s < count) ask(ahead[s], s);
    for (int number = 0; number < count; number += kTiling.ahead) {
#pragma unroll
      for (int s = 0; s < kTiling.ahead; ++s) {
        if (number + s < count) multiply(sums, ahead[s], number + s);
        if (number + s + kTiling.ahead < count) ask(ahead[s], number + s + kTiling.ahead);
      }
    }
  }

  WS_INLINE void keep(const float (&sums)[kRowTiles][kColumnTiles][4], Sums& to) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          to[8 * column + lane % 4 * 2 + i % 2][inside(tile, i / 2)] = sums[tile][column][i];
  }
};

// One tile. `shared` has the sums of each warp; `finish(layer, m, n, sums)` gets neighbouring columns' sums.
template <class D, class P, class Left, class Weight, class Finish>
WS_INLINE void multiply_decoded(const Left* __restrict__ left, const Weight& weight,
                                typename D::Sums* shared, const Finish& finish) {
  const int layer = blockIdx.x / D::kTiles;
  const D product(left, weight, layer);
  float sums[D::kRowTiles][D::kColumnTiles][4] = {};
  product.add(sums);
  product.keep(sums, shared[product.warp]);
  __syncthreads();
  constexpr int kPacks = 16 * D::kRowTiles / P::kPack;
  for (int i = threadIdx.x; i < P::kM * kPacks; i += D::kThreads) {
    const int m = i / kPacks, inside = i % kPacks * P::kPack;
    if (product.first + inside >= P::kN) continue;
    Pack<float, P::kPack> pack = {};
#pragma unroll
    for (int warp = 0; warp < D::kThreads / 32; ++warp)
#pragma unroll
      for (int e = 0; e < P::kPack; ++e) pack[e] += shared[warp][m][inside + e];
    finish(layer, m, product.first + inside, pack);
  }
}

}  // namespace ws
