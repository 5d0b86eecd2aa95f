// What a convolution multiplies on tensor cores, laid out for the copies of `ws_product_windows.cuh`.
#pragma once
#include "ws_product_windows.cuh"

namespace ws {

constexpr int kLayOutThreads = 256, kLayOutBytes = 64 * 128;  // of a tile

// Coordinates of point `number` of some axes, at their place among those of all others.
template <class Axes, int kFirst, class Offset, int kCount> WS_INLINE void place_at(int number, Offset (&at)[kCount]) {
  if constexpr (Axes::points() > 1) {
    Offset found[Axes::kCount];
    Axes::locate(number, found);
#pragma unroll
    for (int k = 0; k < Axes::kCount; ++k) at[kFirst + k] = found[k];
  }
}

// Elements from one to the next, of what is seen in rows of neighbours.
struct WindowRows {
  int64 dimension_1, dimension_0, channel, group, image;
};

// The generated struct W's are:
//
//   Offset                              int, or int64 where a buffer needs it
//   Images, Groups, Made, Channels      axes: of what is seen alone, of both, of weights alone; those that are summed over
//   kCount, kGroup, kMade               coordinates of the first three; where those of the second and third begin
//   kAlongChannels                      whether channels are neighbours in memory, rather than positions
//   kInRows                             whether rows of what is seen are read in vectors:
//   kRows, rows()                       where they lie, and the first of them
//   see(at, channel, position)          what lies at a position of the data
//   weight(at, phase, channel, element) the weight of an element of the window, for outputs of a phase
template <class P, class W> struct LayOut {
  using Element = typename P::Element;
  using Offset = typename W::Offset;
  static constexpr auto kShape = P::kShape;
  static constexpr int kDepth = P::kRowDepth, kPositions = kLayOutBytes / P::kRowBytes;
  static constexpr int kStored = 16 / sizeof(Element);  // elements that a thread stores at once
  static constexpr int kChannels = static_cast<int>(W::Channels::points());
  static constexpr int64 kAll =  // positions of an image
      static_cast<int64>(P::dimension(0).extent) * P::dimension(1).extent * P::dimension(2).extent;
  static constexpr int64 kParts = (kAll + kPositions - 1) / kPositions;
  static constexpr int64 kBlocks = kParts * P::kChannelBoxes * kShape.groups * kShape.images;
  static constexpr int kMade = static_cast<int>(W::Made::points());
  static constexpr int64 kWeights = static_cast<int64>(P::kPhases) * kShape.groups * kMade * P::kWeightDepth;
  // An odd number of words from row to row, so that threads below each other do not meet at one bank.
  using Tile = Element[kDepth][kPositions + 4 / sizeof(Element)];

  // A channel of what is laid out: its residue along each dimension, and its own coordinates; false behind the last.
  struct Channel {
    int residue[3];
    Offset at[W::Channels::kCount];
    bool is_one;
    WS_INLINE Channel(const WindowPart& part, int number) {
      number -= part.channel_box * kDepth;
      is_one = number < part.residues[0] * part.residues[1] * part.residues[2] * kChannels;
      W::Channels::locate(number % kChannels, at);
      number /= kChannels;
#pragma unroll
      for (int d = 2; d >= 0; --d) {
        residue[d] = number % part.residues[d];
        number /= part.residues[d];
      }
    }
  };

  // The part that a box of channels is of; of phases, which see the same, the first.
  static WS_INLINE WindowPart part_with(int box) {
    WindowPart found = P::part(0);
#pragma unroll
    for (int p = 1; p < P::kPartCount; ++p)
      if (!P::kIsPhased && box >= P::part(p).channel_box) found = P::part(p);
    return found;
  }

  static WS_INLINE float see(const W& window, const WindowPart& part, const Offset (&at)[W::kCount], const Channel& channel,
                             int64 number) {
    Offset position[3];
    unsigned rest = static_cast<unsigned>(number);
    bool is_inside = channel.is_one && number < kAll;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const WindowDimension dimension = P::dimension(d);
      const int laid = rest % static_cast<unsigned>(dimension.extent);
      rest /= static_cast<unsigned>(dimension.extent);
      const int residue = P::kIsPhased ? 0 : (part.element[d] + channel.residue[d]) * dimension.step % dimension.stride;
      position[d] = laid * dimension.stride + residue - dimension.padding;
      is_inside = is_inside && position[d] >= 0 && position[d] < dimension.data;
    }
    return is_inside ? window.see(at, channel.at, position) : 0.0f;
  }

  // Fills the tile with vectors of the rows that its positions are of, and zeros around them.
  static WS_INLINE void read_rows(const W& window, int box, int group, int image, int64 first, Tile& tile) {
    constexpr int kRow = P::dimension(2).extent, kData = P::dimension(2).data, kVectors = kData / kStored;
    constexpr int kRowsOfTile = (kPositions + kRow - 2) / kRow + 1, kCount = kDepth * kRowsOfTile * kVectors;
    constexpr int kWords = sizeof(Tile) / 4;
    for (int i = threadIdx.x; i < kWords; i += kLayOutThreads) reinterpret_cast<unsigned*>(&tile)[i] = 0;
    __syncthreads();
    const auto* from = window.rows() + group * W::kRows.group + image * W::kRows.image;
    const int first_row = static_cast<int>(first / kRow), before = static_cast<int>(first % kRow);
    for (int i = threadIdx.x; i < kCount; i += kLayOutThreads) {
      const int vector = i % kVectors, row = first_row + i / kVectors % kRowsOfTile, channel = i / kVectors / kRowsOfTile;
      const int begin = (row - first_row) * kRow - before + P::dimension(2).padding + vector * kStored;
      const int at_1 = row % P::dimension(1).extent - P::dimension(1).padding;
      const int at_0 = row / P::dimension(1).extent - P::dimension(0).padding;
      const bool is_inside = at_1 >= 0 && at_1 < P::dimension(1).data && at_0 >= 0 && at_0 < P::dimension(0).data;
      if (!is_inside || begin + kStored <= 0 || begin >= kPositions || box * kDepth + channel >= kChannels) continue;
      const auto pack = load<kStored, kShared>(from + (box * kDepth + channel) * W::kRows.channel + at_0 * W::kRows.dimension_0 +
                                               at_1 * W::kRows.dimension_1 + vector * kStored);
#pragma unroll
      for (int e = 0; e < kStored; ++e) {
        if (begin + e < 0 || begin + e >= kPositions) continue;
        if constexpr (sizeof(Element) == 4) tile[channel][begin + e] = narrow<Element>(pack[e]);
        else tile[channel][begin + e] = pack[e];
      }
    }
  }

  static WS_INLINE void data(const W& window, int64 block, Element* __restrict__ to, Tile& tile) {
    const int64 first = block % kParts * kPositions;
    block /= kParts;
    const int box = block % P::kChannelBoxes, group = block / P::kChannelBoxes % kShape.groups;
    const int image = static_cast<int>(block / P::kChannelBoxes / kShape.groups);
    Offset at[W::kCount] = {};
    place_at<typename W::Images, 0>(image, at);
    place_at<typename W::Groups, W::kGroup>(group, at);
    if constexpr (W::kInRows) {
      read_rows(window, box, group, image, first, tile);
    } else {
      const WindowPart part = part_with(box);
#pragma unroll
      for (int i = 0; i < kDepth * kPositions / kLayOutThreads; ++i) {
        const int number = i * kLayOutThreads + threadIdx.x;
        const int channel = W::kAlongChannels ? number % kDepth : number / kPositions;
        const int position = W::kAlongChannels ? number / kDepth : number % kPositions;
        tile[channel][position] = narrow<Element>(see(window, part, at, Channel(part, box * kDepth + channel), first + position));
      }
    }
    __syncthreads();
    constexpr int kPieces = kDepth / kStored;
#pragma unroll
    for (int i = 0; i < kPieces * kPositions / kLayOutThreads; ++i) {
      const int number = i * kLayOutThreads + threadIdx.x, piece = number % kPieces, position = number / kPieces;
      if (first + position >= kAll) continue;
      Pack<Element, kStored> pack;
#pragma unroll
      for (int e = 0; e < kStored; ++e) pack[e] = tile[piece * kStored + e][position];
      const int64 place = (image * kAll + first + position) * kShape.groups + group;
      store(to + place * kShape.channels + box * kDepth + piece * kStored, pack);
    }
  }

  static WS_INLINE void weights(const W& window, int64 block, Element* __restrict__ to) {
    const int64 number = block * kLayOutThreads + threadIdx.x;
    if (number >= kWeights) return;
    const int depth = number % P::kWeightDepth, row = number / P::kWeightDepth, layer = row / kMade;
    const int phase = P::kIsPhased ? layer / kShape.groups : 0, at_step = depth / P::kStageDepth;
    int own = phase, before = 0, steps = 1, elements = 0, units = 0;
#pragma unroll
    for (int p = 0; p < P::kPartCount; ++p) {
      if (P::kIsPhased ? p == phase : at_step >= P::steps_before(p) && P::units(p) > 0)
        own = p, before = P::steps_before(p), steps = P::steps(p), elements = P::elements(p), units = P::units(p);
    }
    const WindowPart part = P::part_of(own);
    float value = 0.0f;
    if (units > 0) {
      const int inside = (depth - before * P::kStageDepth) / P::kRowDepth, of_unit = steps * P::kStepElements;
      const int unit = inside / of_unit, box = part.channel_box + unit % part.channel_boxes;
      const Channel channel(part, box * kDepth + depth % P::kRowDepth);
      typename P::WindowElement element;
      element.template find<false>(part, unit / part.channel_boxes);
      element.template find<true>(part, inside % of_unit);
      Offset numbers[3], phases[3];
      const bool is_one = channel.is_one && inside % of_unit < elements && unit < units;
      int rest = phase;
#pragma unroll
      for (int d = 2; d >= 0; --d) {
        numbers[d] = part.element[d] + channel.residue[d] + element.at[d] * P::dimension(d).every;
        phases[d] = rest % P::phases(d);
        rest /= P::phases(d);
      }
      if (is_one) {
        Offset at[W::kCount] = {};
        place_at<typename W::Groups, W::kGroup>(layer % kShape.groups, at);
        place_at<typename W::Made, W::kMade>(row % kMade, at);
        value = window.weight(at, phases, channel.at, numbers);
      }
    }
    to[number] = narrow<Element>(value);
  }
};

template <class P, class W>
WS_INLINE void lay_out(const W& window, typename P::Element* __restrict__ seen, typename P::Element* __restrict__ weights,
                       typename LayOut<P, W>::Tile& tile) {
  using Made = LayOut<P, W>;
  const int64 block = blockIdx.x;
  if (block < Made::kBlocks) Made::data(window, block, seen, tile);
  else Made::weights(window, block - Made::kBlocks, weights);
}

// Where the other is copied from where it lies.
template <class P, class W>
WS_INLINE void lay_out_seen(const W& window, typename P::Element* __restrict__ seen, typename LayOut<P, W>::Tile& tile) {
  LayOut<P, W>::data(window, blockIdx.x, seen, tile);
}
template <class P, class W>
WS_INLINE void lay_out_weights(const W& window, typename P::Element* __restrict__ weights) {
  LayOut<P, W>::weights(window, blockIdx.x, weights);
}

}  // namespace ws
