// What a thread holds of several tensors: for each, some vectors of its own type.
#pragma once
#include "ws_types.cuh"

namespace ws {

// Types, and one value of each.
template <class... Types> struct List { static constexpr int kCount = 0; };
template <class First, class... More> struct List<First, More...> : List<More...> {
  static constexpr int kCount = 1 + sizeof...(More);
  First first;
  template <int k> WS_INLINE auto& get() {
    if constexpr (k == 0) return first;
    else return List<More...>::template get<k - 1>();
  }
};
template <int k, class Types> struct TypeAt;
template <class First, class... More> struct TypeAt<0, List<First, More...>> { using Type = First; };
template <int k, class First, class... More> struct TypeAt<k, List<First, More...>> : TypeAt<k - 1, List<More...>> {};
template <int k, class Types> using type_at = typename TypeAt<k, Types>::Type;

// Which of the vectors of a list a generated struct loads.
template <int k> struct VectorLoad {};

template <class T> struct OfVector;
template <class T, int kWidth_> struct OfVector<Pack<T, kWidth_>> {
  using Element = T;
  static constexpr int kWidth = kWidth_;
};

// kElements of each tensor, in vectors of the types in a list.
template <class Vector, int kItems_> struct Held {
  static constexpr int kItems = kItems_;
  Vector item[kItems];
};
template <int kElements, class Vectors> struct HeldOfEach;
template <int kElements, class... Vectors> struct HeldOfEach<kElements, List<Vectors...>> {
  using Type = List<Held<Vectors, kElements / OfVector<Vectors>::kWidth>...>;
};
template <int kElements, class Vectors> using held_of_each = typename HeldOfEach<kElements, Vectors>::Type;

// kItems vectors of each tensor, whatever their widths.
template <int kItems, class Vectors> struct ItemsOfEach;
template <int kItems, class... Vectors> struct ItemsOfEach<kItems, List<Vectors...>> {
  using Type = List<Held<Vectors, kItems>...>;
};
template <int kItems, class Vectors> using items_of_each = typename ItemsOfEach<kItems, Vectors>::Type;

}  // namespace ws
