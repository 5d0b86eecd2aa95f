// Threads of a CPU, and the points of some axes that they share.
// The one idea: each thread works with a copy of the nest's generated struct, so that its members stay in registers, and has
// the arrays of `Held` to itself. All skeletons of `ws_*.hpp` run so. Of the struct they ask, each only where it has any:
//
//   Held, held   a struct of arrays that stay in the first-level cache, and a pointer to the thread's own
//   start()      sets the members that are the same everywhere
//   locate(at)   sets those that coordinates along the outer axes decide
//   stream(…)    writes what lies in `held` to memory around the cache
#pragma once
#include <utility>

#include "ws_loops.hpp"

namespace ws {

// Numbers of functions that a struct has several of.
template <int kNumber> struct Number {
  static constexpr int value = kNumber;
};

// An argument of a kernel, as whatever pointer it is asked for.
struct Argument {
  void* address;
  template <class T> WS_INLINE operator T*() const { return static_cast<T*>(address); }
};
template <class W, std::size_t... k> WS_INLINE W bind(void* const* arguments, std::index_sequence<k...>) {
  return W{Argument{arguments[k]}...};
}
// The struct whose first members are the first kCount arguments.
template <class W, std::size_t kCount> WS_INLINE W bind(void* const* arguments) {
  return bind<W>(arguments, std::make_index_sequence<kCount>());
}

// Axes of fixed extents, the last of which counts fastest.
template <long... kExtents> struct Space {
  static constexpr int kAxes = sizeof...(kExtents);
  static constexpr long kPoints = (1 * ... * kExtents);
  static constexpr long kExtent[kAxes + 1] = {kExtents..., 1};
  template <long kInner> using With = Space<kExtents..., kInner>;
  template <long kOuter> using Times = Space<kOuter, kExtents...>;
  static constexpr long points_from(int axis) {
    long product = 1;
    for (int k = axis; k < kAxes; ++k) product *= kExtent[k];
    return product;
  }

  // The coordinates of a point's number.
  template <int k = 0> static WS_INLINE void locate(long number, long* at) {
    if constexpr (k < kAxes) {
      at[k] = number / points_from(k + 1);
      if constexpr (k > 0) at[k] %= kExtent[k];
      locate<k + 1>(number, at);
    }
  }
  // Moves to the next point: quotients would take longer than a short block.
  template <int k = kAxes - 1> static WS_INLINE void step(long* at) {
    if constexpr (k > 0 && kExtent[k] == 1) {
      step<k - 1>(at);
    } else if constexpr (k > 0) {
      if (++at[k] < kExtent[k]) return;
      at[k] = 0;
      step<k - 1>(at);
    } else if constexpr (k == 0) {
      ++at[0];
    }
  }

  // Calls `visit(at, number)` for the points from number `begin` on, in order.
  template <class Visit> static WS_INLINE void each(long begin, long end, const Visit& visit) {
    long at[kAxes + 1] = {};
    if constexpr (kAxes > 1) locate(begin, at);
    for (long number = begin; number < end; ++number) {
      if constexpr (kAxes == 1) at[0] = number;
      visit(at, number);
      if constexpr (kAxes > 1) step(at);
    }
  }
  template <class Visit> static WS_INLINE void each(const Visit& visit) { each(0, kPoints, visit); }
};

// kThreads threads; 0: as many as the caller allows; 1: the caller alone, which starts nothing.
template <int kThreads> struct Team {
  // Every thread calls `work(own)` with a nest of its own.
  template <class W, class Work> static WS_INLINE void run(const W& nest, const Work& work) {
    if constexpr (kThreads == 1) {
      work_alone(nest, work);
    } else if constexpr (kThreads > 1) {
#pragma omp parallel num_threads(kThreads)
      work_alone(nest, work);
    } else {
#pragma omp parallel
      work_alone(nest, work);
    }
  }

  // Inside `run`: the threads call `visit(at, number)` for every point of a space, each for a range of its own.
  template <class Points, class Visit> static WS_INLINE void share(const Visit& visit) {
    if constexpr (kThreads == 1) {
      Points::each(visit);
    } else {
      long at[Points::kAxes + 1] = {}, expected = 0;
#pragma omp for schedule(static) nowait
      for (long number = 0; number < Points::kPoints; ++number) {
        if (number != expected) Points::locate(number, at);
        expected = number + 1;
        visit(at, number);
        Points::step(at);
      }
    }
  }

 private:
  template <class W, class Work> static WS_INLINE void work_alone(const W& nest, const Work& work) {
    W own = nest;
    if constexpr (requires { own.held; }) {
      typename W::Held held;
      own.held = &held;
      work_started(own, work);
    } else {
      work_started(own, work);
    }
  }
  template <class W, class Work> static WS_INLINE void work_started(W& own, const Work& work) {
    if constexpr (requires { own.start(); }) own.start();
    work(own);
    if constexpr (requires { own.stream(0L, 0L); }) stream_fence();
  }
};

template <class W> WS_INLINE void locate(W& nest, const long* at) {
  if constexpr (requires { nest.locate(at); }) nest.locate(at);
}

// Where a block ends that begins somewhere, of kSize or what is left.
template <long kExtent, long kSize> WS_INLINE long end_of_block(long begin) {
  if constexpr (kExtent % kSize == 0) return begin + kSize;
  else return begin + kSize < kExtent ? begin + kSize : kExtent;
}

// Calls `store(j, e)` for the elements of a block, e from 0; what that leaves in `held` is streamed to memory.
template <class W> WS_INLINE void store_block(const W& nest, long begin, long end) {
#pragma omp simd
  for (long j = begin; j < end; ++j) nest.store(j, j - begin);
  if constexpr (requires { nest.stream(begin, end); }) nest.stream(begin, end - begin);
}

}  // namespace ws
