// Several nests in one kernel: each has a range of the blocks, and nests that differ in names alone share one, in which a switch
// says whose pointers a block works with. The generated kernel has the ranges; what the nests do stands in their own skeletons.
#pragma once
#include "ws_types.cuh"

namespace ws {

// Shared memory of a block, which works on one of the nests: as large as the largest needs.
template <class... Types> union OneOf {};
template <class First, class... More> union OneOf<First, More...> {
  First first;
  OneOf<More...> more;
  template <int k> WS_INLINE auto& get() {
    if constexpr (k == 0) return first;
    else return more.template get<k - 1>();
  }
};

}  // namespace ws
