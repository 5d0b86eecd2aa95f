// Nests without reductions: a thread computes a few vectors of neighbours, all of whose loads are made before the first store,
// so that their latencies overlap. What is loaded, computed and stored is the generated struct W's:
//
//   Offset                       int, or int64 where a buffer needs it
//   kTiling, Outer               sizes, see below
//   Loads                        List of the vectors that are loaded, of any width
//   load(VectorLoad<k>, at, j)   the k-th of them, from element j of the innermost axis on
//   compute(at, j, …)            gets the loaded vectors in order, loads what does not lie together, and stores
//
// `at` holds coordinates along the axes beside the innermost (Outer).
#pragma once
#include "ws_axes.cuh"
#include "ws_vectors.cuh"

namespace ws {

struct PointwiseTiling {
  int threads, items, vector_width;  // of a block; vectors of a thread; elements of a vector
  int64 row_vectors;                 // vectors of the innermost axis
  bool by_rows;                      // a block stays in one row, so its threads find what a row shares once
  bool overlap;                      // programmatic dependent launch
};

template <class W> struct Pointwise {
  using Offset = typename W::Offset;
  using Loads = typename W::Loads;
  static constexpr PointwiseTiling kTiling = W::kTiling;
  static constexpr Offset kVectors = kTiling.row_vectors * (kTiling.by_rows ? 1 : W::Outer::points());
  static constexpr Offset kOfBlock = kTiling.threads * kTiling.items, kRowBlocks = (kTiling.row_vectors + kOfBlock - 1) / kOfBlock;
  static constexpr bool kIsEven = kVectors % kOfBlock == 0;

  const W& computation;
  const unsigned block;
  Offset number = static_cast<Offset>(kTiling.by_rows ? block % kRowBlocks : block) * kOfBlock + threadIdx.x;
  items_of_each<kTiling.items, Loads> held;

  // Leaves `held` as it is: a brace initialiser would clear it.
  WS_INLINE Pointwise(const W& given, unsigned own) : computation(given), block(own) {}

  struct Place {
    Offset at[W::Outer::kCount], begin;
    WS_INLINE Place(unsigned block, Offset vector) {
      if constexpr (kTiling.by_rows) W::Outer::locate(static_cast<Offset>(block) / kRowBlocks, at);
      else W::Outer::template locate<kTiling.row_vectors>(vector, at);
      const bool crosses = !kTiling.by_rows && W::Outer::points() > 1;
      begin = kTiling.vector_width * (crosses ? vector % static_cast<Offset>(kTiling.row_vectors) : vector);
    }
  };

  template <int k = 0> WS_INLINE void load(int item, const Place& place) {
    if constexpr (k < Loads::kCount) {
      held.template get<k>().item[item] = computation.load(VectorLoad<k>{}, place.at, place.begin);
      load<k + 1>(item, place);
    }
  }
  // `given` grows by the item's loaded vectors.
  template <int k = 0, class... Given> WS_INLINE void compute(int item, const Place& place, const Given&... given) {
    if constexpr (k < Loads::kCount) compute<k + 1>(item, place, given..., held.template get<k>().item[item]);
    else computation.compute(place.at, place.begin, given...);
  }
};

// `block`: which of the nest's blocks this one is, where a kernel has more to do than one nest.
template <class W> WS_INLINE void compute_pointwise(const W& computation, unsigned block = blockIdx.x) {
  using Kernel = Pointwise<W>;
  if constexpr (W::kTiling.overlap) wait_for_previous(), launch_dependents();
  Kernel kernel(computation, block);
  if constexpr (W::kTiling.items == 1) {
    if (!Kernel::kIsEven && kernel.number >= Kernel::kVectors) return;
    const typename Kernel::Place place(kernel.block, kernel.number);
    kernel.load(0, place);
    kernel.compute(0, place);
    return;
  }
#pragma unroll
  for (int item = 0; item < W::kTiling.items; ++item) {
    const typename W::Offset vector = kernel.number + item * W::kTiling.threads;
    if (!Kernel::kIsEven && vector >= Kernel::kVectors) break;
    kernel.load(item, typename Kernel::Place(kernel.block, vector));
  }
#pragma unroll
  for (int item = 0; item < W::kTiling.items; ++item) {
    const typename W::Offset vector = kernel.number + item * W::kTiling.threads;
    if (!Kernel::kIsEven && vector >= Kernel::kVectors) break;
    kernel.compute(item, typename Kernel::Place(kernel.block, vector));
  }
}

}  // namespace ws
