// Running results of several reductions: in lanes of a row, or one for each column of a tile.
#pragma once
#include "ws_threads.hpp"

namespace ws {

// kCount running results; values and their positions lie apart, so that loops over them vectorise.
template <class T, long kCount> struct Lanes {
  alignas(64) T value[kCount];
  WS_INLINE T get(long lane) const { return value[lane]; }
  WS_INLINE void set(long lane, T next) { value[lane] = next; }
  template <class Operation> WS_INLINE void take(long lane, T next) {
    value[lane] = Operation::template of<T>(value[lane], next);
  }
};
template <class T, class I, long kCount> struct Lanes<At<T, I>, kCount> {
  alignas(64) T value[kCount];
  alignas(64) I position[kCount];
  WS_INLINE At<T, I> get(long lane) const { return {value[lane], position[lane]}; }
  WS_INLINE void set(long lane, At<T, I> next) { value[lane] = next.value, position[lane] = next.position; }
  template <class Operation> WS_INLINE void take(long lane, At<T, I> next) {
    const bool better = Operation::is_better(next, get(lane));
    value[lane] = better ? next.value : value[lane];
    position[lane] = better ? next.position : position[lane];
  }
};

template <class T, long kCount> WS_INLINE void fill(Lanes<T, kCount>& lanes, T value) {
#pragma omp simd
  for (long lane = 0; lane < kCount; ++lane) lanes.set(lane, value);
}

// Folds the lanes: values by halving, 64 of them in six steps; those with positions one after the other.
template <class Operation, class T, long kCount> WS_INLINE T fold(Lanes<T, kCount>& lanes) { return fold<Operation>(lanes.value); }
template <class Operation, class T, class I, long kCount> WS_INLINE At<T, I> fold(Lanes<At<T, I>, kCount>& lanes) {
  At<T, I> best = lanes.get(0);
  for (long lane = 1; lane < kCount; ++lane) best = Operation::of(best, lanes.get(lane));
  return best;
}

// Lanes of several types.
template <long kCount, class... All> struct Arrays {};
template <long kCount, class First, class... Rest> struct Arrays<kCount, First, Rest...> {
  Lanes<First, kCount> first;
  Arrays<kCount, Rest...> rest;
  template <int i> WS_INLINE auto& at() {
    if constexpr (i == 0) return first;
    else return rest.template at<i - 1>();
  }
  template <int i> WS_INLINE const auto& at() const {
    if constexpr (i == 0) return first;
    else return rest.template at<i - 1>();
  }
};

template <int kNumber, class First, class... Rest> struct Nth : Nth<kNumber - 1, Rest...> {};
template <class First, class... Rest> struct Nth<0, First, Rest...> { using Type = First; };
template <class... All> struct List {
  static constexpr int kCount = sizeof...(All);
  template <int i> using At = typename Nth<i, All...>::Type;
};

// Calls `visit(Number<0>())`, `visit(Number<1>())`, …
template <class Visit, int... i> WS_INLINE void each_number(const Visit& visit, std::integer_sequence<int, i...>) {
  (visit(Number<i>()), ...);
}
template <int kCount, class Visit> WS_INLINE void each_number(const Visit& visit) {
  each_number(visit, std::make_integer_sequence<int, kCount>());
}

// How values are reduced. Sums of floats add up in double over blocks and groups of rows, so that long ones stay as exact as
// pairwise sums.
template <class Operation_, class T> struct Reduction {
  using Operation = Operation_;
  using Value = T;
  using Total = std::conditional_t<std::is_same_v<Operation, Sum> && std::is_same_v<T, float>, double, T>;
  static constexpr bool kWidens = !std::is_same_v<T, Total>;
  static WS_INLINE Value neutral() { return Operation::template neutral<Value>(); }
  static WS_INLINE Total neutral_total() { return Operation::template neutral<Total>(); }
};

// The reductions that one sweep over the elements makes.
template <class... All> struct Reductions : List<All...> {
  template <int i> using At = typename List<All...>::template At<i>;
  template <long kCount> using Totals = Arrays<kCount, typename All::Total...>;

  template <long kCount> struct Running : Arrays<kCount, typename All::Value...> {
    template <int i> WS_INLINE void take(long lane, typename At<i>::Value value) {
      this->template at<i>().template take<typename At<i>::Operation>(lane, value);
    }
    template <int i> WS_INLINE auto get(long lane = 0) const { return this->template at<i>().get(lane); }
    WS_INLINE void clear() {
      each_number<sizeof...(All)>([&](auto number) WS_BODY { fill(this->template at<number.value>(), At<number.value>::neutral()); });
    }
  };
};

}  // namespace ws
