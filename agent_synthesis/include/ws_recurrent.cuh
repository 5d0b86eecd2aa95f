// A recurrent network in one kernel: LSTM, GRU and plain cells, layers and directions of them, for sm_80 and later.
//
// A cell, one layer in one direction, is spread over `ctas` CTAs. Each has `units` of the cell's hidden units and keeps their
// weights in registers from the first step to the last (persistent RNN, Diamos et al., ICML 2016): a warp has a few rows of the
// two matrices, a lane every 32nd vector of four columns. `layers` layers run at once, each a step or more behind the one below
// (a wavefront); then come the next. A direction needs its own layer below to the end, so with two of them layers follow each
// other.
//
// The CTAs of a cell tell each other a step's hidden state by words of 64 bits in the second-level cache, a float and the number
// of the step: no fence, no second round trip. There are two sets of words: who writes step t has read all of step t - 1, so
// all have read step t - 2. While the words travel, a CTA multiplies what the layer below gives for its next step, which it has
// begun to load a step before; how far that layer is, a counter for each cell says, now and then. Words and counters are zero
// between calls: the last CTA to end clears them.
#pragma once
#include "ws_reduce.cuh"

namespace ws {

enum class Cell { kLstm, kGru, kTanh, kRelu };

struct RecurrentSizes {
  int steps, batch, inputs, hidden, layers, directions;
};
// `layers` at once; `chunk` of the batch whose sums a thread has at a time.
struct RecurrentTiling {
  int layers, ctas, units, threads, chunk;
};

// Elements from a row of a weight to the next, and from a column to the next.
struct WeightStrides {
  int64 row, column;
};

// The network's numbers. `Net` has pointers and strides:
//   x_at(step, row, column), hidden_at(cell, row, unit), memory_at(cell, row, unit): elements of what is given; the last of an
//       LSTM's cell states;
//   input_weight(cell), hidden_weight(cell), input_bias(cell), hidden_bias(cell): rows of gates as PyTorch has them; a bias may
//       be null; input_weight_strides(cell), hidden_weight_strides(cell): of the weights, which may be columns of another matrix;
//   keep_sequence(step, row, column, value), keep_hidden(cell, row, unit, value), keep_memory(...): what to store of results.
template <class T, Cell kCell_, RecurrentSizes kSizes, RecurrentTiling kTiling> struct Recurrent {
  using Element = T;
  static constexpr Cell kCell = kCell_;
  static constexpr int kSteps = kSizes.steps, kBatch = kSizes.batch, kInputs = kSizes.inputs, kHidden = kSizes.hidden;
  static constexpr int kLayers = kSizes.layers, kDirections = kSizes.directions, kCells = kLayers * kDirections;
  static constexpr int kBelow = kDirections * kHidden;  // columns of a layer's sequence
  static constexpr int kAtOnce = kTiling.layers, kCtas = kTiling.ctas, kUnits = kTiling.units;
  static constexpr int kThreads = kTiling.threads, kChunk = kTiling.chunk;
  static constexpr int kGates = kCell == Cell::kLstm ? 4 : kCell == Cell::kGru ? 3 : 1;
  static constexpr int kRows = kGates * kUnits;  // of the matrices, in a CTA
  static constexpr int kWarps = kThreads / 32, kWarpRows = (kRows + kWarps - 1) / kWarps;
  static constexpr int kMostInputs = kLayers > 1 && kBelow > kInputs ? kBelow : kInputs;
  static constexpr int kInputVectors = (kMostInputs + 127) / 128, kHiddenVectors = (kHidden + 127) / 128;
  static constexpr int kInputPitch = 128 * kInputVectors, kHiddenPitch = 128 * kHiddenVectors;
  static constexpr int kPadded = (kBatch + kChunk - 1) / kChunk * kChunk;
  static constexpr int kPositions = kAtOnce * kDirections;         // cells at once
  static constexpr int kWordPitch = (kHidden + 1) / 2 * 2;          // words of a row of the batch
  static constexpr int64 kSetWords = int64(kBatch) * kWordPitch;    // of a cell's step
  static constexpr int kCounterWords = 16;                          // a line of the cache each
  static constexpr int64 kCountersAt = 2 * kPositions * kSetWords, kWords = kCountersAt + (kCells + 1) * kCounterWords;
  static constexpr int kSequences = kLayers == 1 ? 1 : kLayers - 1 < kAtOnce + 1 ? kLayers - 1 : kAtOnce + 1;  // between layers
  static constexpr int64 kSequence = int64(kSteps) * kBatch * kBelow;                     // elements of one
  // Steps that a CTA tells the layer above of at once, counted from the last; of two directions all. To tell, it waits for its own
  // writes. And no CTA may be a telling ahead of another, since they are counted together: two steps ahead none can be.
  static constexpr int kTold = kDirections == 1 ? 2 : kSteps, kTellings = (kSteps + kTold - 1) / kTold;
  static constexpr int kFirstTold = (kSteps - 1) % kTold;
  static constexpr int kLoads = (kBatch * kMostInputs + kThreads - 1) / kThreads;  // a thread's, of a step's input
  static constexpr bool kAhead = kLoads <= 24;                                     // as many as registers hold
};

// A CTA's shared memory: values of the batch, a row each; sums of either product for each row of the matrices.
template <class R> struct RecurrentMemory {
  alignas(16) float hidden[R::kPadded * R::kHiddenPitch];
  alignas(16) float input[R::kPadded * R::kInputPitch];
  float hidden_sum[R::kRows * R::kPadded], input_sum[R::kRows * R::kPadded];
  float hidden_bias[R::kRows], input_bias[R::kRows];
  float memory[R::kUnits * R::kBatch];  // an LSTM's cell states
  bool is_last;
};

template <class T> WS_INLINE float as_float(T value) {
  if constexpr (sizeof(T) == sizeof(float)) return value;
  else return widen(value);
}
template <class T> WS_INLINE T as_element(float value) {
  if constexpr (sizeof(T) == sizeof(float)) return value;
  else return narrow<T>(value);
}

// The columns that a lane has of a warp's rows, zero beyond the matrix. Row g * units + u is gate g of the CTA's unit u.
template <class R, int kVectors>
WS_INLINE void load_weights(
    float (&weight)[R::kWarpRows][4 * kVectors], const typename R::Element* matrix, WeightStrides strides, int columns, int first_unit) {
#pragma unroll
  for (int r = 0; r < R::kWarpRows; ++r) {
    const int row = threadIdx.x / 32 * R::kWarpRows + r, unit = first_unit + row % R::kUnits;
    const bool exists = row < R::kRows && unit < R::kHidden;
    const typename R::Element* from = matrix + (row / R::kUnits * R::kHidden + unit) * strides.row;
#pragma unroll
    for (int c = 0; c < 4 * kVectors; ++c) {
      const int column = c / 4 * 128 + threadIdx.x % 32 * 4 + c % 4;
      weight[r][c] = exists && column < columns ? as_float(from[column * strides.column]) : 0.0f;
    }
  }
}

// sums[row][b] = sum over columns of weight[row] * values[b]: a lane's part of each, then over the lanes, which halve what they
// still have to add in each of five exchanges.
template <class R, int kVectors>
WS_INLINE void multiply(const float (&weight)[R::kWarpRows][4 * kVectors], const float* values, float* sums) {
  constexpr int kCount = R::kWarpRows * R::kChunk, kPitch = 128 * kVectors;
  constexpr int kWide = kCount <= 1 ? 1 : kCount <= 2 ? 2 : kCount <= 4 ? 4 : kCount <= 8 ? 8 : kCount <= 16 ? 16 : 32;
  static_assert(kCount <= 32, "a sum for each lane");
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * R::kWarpRows;
  if (first_row >= R::kRows) return;  // a warp without rows would read shared memory for nothing
#pragma unroll 2
  for (int first = 0; first < R::kPadded; first += R::kChunk) {
    float sum[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int b = 0; b < R::kChunk; ++b) {
        const auto part = *reinterpret_cast<const Pack<float, 4>*>(values + (first + b) * kPitch + 128 * v + 4 * lane);
#pragma unroll
        for (int r = 0; r < R::kWarpRows; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[r * R::kChunk + b] = fmaf(weight[r][4 * v + e], part[e], sum[r * R::kChunk + b]);
        }
      }
    }
#pragma unroll
    for (int exchange = 1; exchange <= 5; ++exchange) {
      const int half = kWide >> exchange;
      const bool upper = lane & half;
#pragma unroll
      for (int i = 0; i < kWide / 2; ++i) {
        if (i >= half) break;
        const float sent = upper ? sum[i] : sum[i + half], kept = upper ? sum[i + half] : sum[i];
        sum[i] = kept + __shfl_xor_sync(~0u, sent, half);
      }
    }
#pragma unroll
    for (int apart = kWide; apart < 32; apart *= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], apart);
    const int row = first_row + lane / R::kChunk;
    if (lane < kCount && row < R::kRows) sums[row * R::kPadded + first + lane % R::kChunk] = sum[0];
  }
}

// For a warp: what was done before the counter had come so far is done. How far it has come.
WS_INLINE unsigned wait_for(const unsigned* counter, unsigned count) {
  unsigned seen = 0;
  if (threadIdx.x % 32 == 0) {
    do seen = ptx::load_acquire(counter);
    while (seen < count);
  }
  __syncwarp();
  return __shfl_sync(~0u, seen, 0);
}

// Whether the second of two words is of no unit.
template <class R> WS_INLINE bool is_beyond(int unit) { return R::kHidden % 2 != 0 && unit + 1 >= R::kHidden; }

// What all CTAs of a cell tell each other under a number, two words at a time, in shared memory.
template <class R> WS_INLINE void fetch_words(const uint64* from, unsigned number, float* hidden) {
  constexpr int kPairs = int(R::kSetWords / 2), kEach = (kPairs + R::kThreads - 1) / R::kThreads, kRound = kEach < 8 ? kEach : 8;
#pragma unroll 1
  for (int round = 0; round < kPairs; round += kRound * R::kThreads) {
    const auto exists = [&](int i) {  // known beforehand but for the last
      return (kEach <= kRound && (i + 1) * R::kThreads <= kPairs) || round + i * R::kThreads + int(threadIdx.x) < kPairs;
    };
    uint64 word[kRound][2];
    bool all;
    do {
      all = true;
#pragma unroll
      for (int i = 0; i < kRound; ++i)
        if (exists(i)) ptx::load_relaxed(from + 2 * (round + i * R::kThreads + threadIdx.x), word[i][0], word[i][1]);
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        const int unit = 2 * (round + i * R::kThreads + threadIdx.x) % R::kWordPitch;
        if (exists(i)) all &= word[i][0] >> 32 == number && (is_beyond<R>(unit) || word[i][1] >> 32 == number);
      }
    } while (!all);
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int place = 2 * (round + i * R::kThreads + threadIdx.x), unit = place % R::kWordPitch;
      if (exists(i)) {
        float* to = hidden + place / R::kWordPitch * R::kHiddenPitch + unit;
        to[0] = __int_as_float(static_cast<int>(word[i][0]));
        if (!is_beyond<R>(unit)) to[1] = __int_as_float(static_cast<int>(word[i][1]));
      }
    }
  }
}

// A gate, by a reciprocal of one unit in the last place: a division takes a third of what all gates of a step do.
WS_INLINE float gate_of(float x) { return ptx::approximate_reciprocal(1.0f + exp(-x)); }

// One cell on its CTAs, from the first step to the last.
template <class R, class Net> struct RecurrentCell {
  using Element = typename R::Element;
  const Net& net;
  RecurrentMemory<R>& memory;
  Element* sequences;
  uint64* words;
  int layer, direction, rank;
  unsigned known[R::kDirections] = {};  // how far the cells below are, as last seen
  Element ahead[R::kAhead ? R::kLoads : 1];  // the next step's input, on its way

  WS_INLINE int cell() const { return layer * R::kDirections + direction; }
  WS_INLINE int first_unit() const { return rank * R::kUnits; }
  WS_INLINE int time(int step) const { return direction == 0 ? step : R::kSteps - 1 - step; }
  WS_INLINE unsigned* counter(int of) const { return reinterpret_cast<unsigned*>(words + R::kCountersAt + of * R::kCounterWords); }
  WS_INLINE Element* sequence(int of) const { return sequences + of % R::kSequences * R::kSequence; }
  // Of all steps of all layers of this place, from 1 on.
  WS_INLINE unsigned number(int step) const { return unsigned(layer / R::kAtOnce) * R::kSteps + step + 1; }
  WS_INLINE uint64* set_of(unsigned number) const {
    return words + (number % 2 * R::kPositions + layer % R::kAtOnce * R::kDirections + direction) * R::kSetWords;
  }

  WS_INLINE void run() {
    float input_weight[R::kWarpRows][4 * R::kInputVectors], hidden_weight[R::kWarpRows][4 * R::kHiddenVectors];
    load_weights<R, R::kInputVectors>(
        input_weight, net.input_weight(cell()), net.input_weight_strides(cell()), columns(), first_unit());
    load_weights<R, R::kHiddenVectors>(
        hidden_weight, net.hidden_weight(cell()), net.hidden_weight_strides(cell()), R::kHidden, first_unit());
    begin();
    if constexpr (R::kAhead) load_input(0);
    put_input(0);
    __syncthreads();
    multiply<R, R::kInputVectors>(input_weight, memory.input, memory.input_sum);
#pragma unroll 1
    for (int step = 0; step < R::kSteps; ++step) {
      const bool goes_on = step + 1 < R::kSteps;
      if (R::kAhead && goes_on) load_input(step + 1);
      if (step > 0) fetch_words<R>(set_of(number(step - 1)), number(step - 1), memory.hidden);
      __syncthreads();
      multiply<R, R::kHiddenVectors>(hidden_weight, memory.hidden, memory.hidden_sum);
      __syncthreads();
      advance(step);
      if (goes_on) put_input(step + 1);
      __syncthreads();
      if (threadIdx.x == 0 && step % R::kTold == R::kFirstTold) ptx::count_release(counter(cell()));
      if (goes_on) multiply<R, R::kInputVectors>(input_weight, memory.input, memory.input_sum);
    }
  }

  // Columns of what the layer reads.
  WS_INLINE int columns() const { return layer == 0 ? R::kInputs : R::kBelow; }

  WS_INLINE void begin() {
    for (int i = threadIdx.x; i < R::kPadded * R::kHiddenPitch; i += R::kThreads) {
      const int row = i / R::kHiddenPitch, unit = i % R::kHiddenPitch;
      memory.hidden[i] = row < R::kBatch && unit < R::kHidden ? as_float(net.hidden_at(cell(), row, unit)) : 0.0f;
    }
    for (int i = threadIdx.x; i < R::kPadded * R::kInputPitch; i += R::kThreads) memory.input[i] = 0.0f;
    for (int i = threadIdx.x; i < R::kRows; i += R::kThreads) {
      const int unit = first_unit() + i % R::kUnits, row = i / R::kUnits * R::kHidden + unit;
      const Element *input = net.input_bias(cell()), *hidden = net.hidden_bias(cell());
      memory.input_bias[i] = input != nullptr && unit < R::kHidden ? as_float(input[row]) : 0.0f;
      memory.hidden_bias[i] = hidden != nullptr && unit < R::kHidden ? as_float(hidden[row]) : 0.0f;
    }
    if constexpr (R::kCell == Cell::kLstm) {
      for (int i = threadIdx.x; i < R::kUnits * R::kBatch; i += R::kThreads) {
        const int unit = first_unit() + i % R::kUnits;
        if (unit < R::kHidden) memory.memory[i] = as_float(net.memory_at(cell(), i / R::kUnits, unit));
      }
    }
    // The CTAs of this place have read all words of the layer that was here, and all of the sequence below it.
    if (layer >= R::kAtOnce) wait_for(counter(cell() - R::kPositions), unsigned(R::kCtas) * R::kTellings);
    __syncthreads();
  }

  // Waits until the layer below has made what this one reads at a step.
  WS_INLINE void wait_below(int at) {
    if (layer == 0) return;
#pragma unroll
    for (int below = 0; below < R::kDirections; ++below) {
      const unsigned tellings = R::kDirections == 1 ? (at - R::kFirstTold + 2 * R::kTold - 1) / R::kTold : 1;
      if (known[below] < R::kCtas * tellings)
        known[below] = wait_for(counter((layer - 1) * R::kDirections + below), R::kCtas * tellings);
    }
  }

  // Calls visit(i, row, column) for the elements of this thread of a step's input: of `kWidth` columns, a constant, for a
  // division by anything else costs more than what it is for.
  template <int kWidth, class Visit> WS_INLINE void each_input(const Visit& visit) const {
    constexpr int kEach = (R::kBatch * kWidth + R::kThreads - 1) / R::kThreads;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int place = i * R::kThreads + threadIdx.x;
      if ((i + 1) * R::kThreads <= R::kBatch * kWidth || place < R::kBatch * kWidth) visit(i, place / kWidth, place % kWidth);
    }
  }

  WS_INLINE void load_input(int step) {
    const int at = time(step);
    wait_below(at);
    if (layer == 0) {
      each_input<R::kInputs>([&](int i, int row, int column) { ahead[i] = net.x_at(at, row, column); });
    } else {
      const Element* from = sequence(layer - 1) + int64(at) * R::kBatch * R::kBelow;
      each_input<R::kBelow>([&](int i, int row, int column) { ahead[i] = from[row * R::kBelow + column]; });
    }
  }

  // Leaves a step's input where all read it.
  WS_INLINE void put_input(int step) {
    const auto put = [&](int i, int row, int column) { memory.input[row * R::kInputPitch + column] = as_float(ahead[i]); };
    if constexpr (R::kAhead) {
      if (layer == 0) each_input<R::kInputs>(put);
      else each_input<R::kBelow>(put);
      return;
    }
    const int at = time(step);
    wait_below(at);
    if (layer == 0) {
      each_input<R::kInputs>([&](int, int row, int column) {
        memory.input[row * R::kInputPitch + column] = as_float(net.x_at(at, row, column));
      });
    } else {
      const Element* from = sequence(layer - 1) + int64(at) * R::kBatch * R::kBelow;
      each_input<R::kBelow>([&](int, int row, int column) {
        memory.input[row * R::kInputPitch + column] = as_float(from[row * R::kBelow + column]);
      });
    }
  }

  // The gates of the CTA's units, and what becomes of their new hidden states.
  WS_INLINE void advance(int step) {
    const int at = time(step);
    for (int i = threadIdx.x; i < R::kUnits * R::kBatch; i += R::kThreads) {
      const int own = i % R::kUnits, row = i / R::kUnits, unit = first_unit() + own;
      if (unit >= R::kHidden) continue;
      const Element next = as_element<Element>(gates(own, row, unit));
      const float value = as_float(next);
      if (step + 1 < R::kSteps) {
        const uint64 word = uint64(number(step)) << 32 | static_cast<unsigned>(__float_as_int(value));
        ptx::store_relaxed(set_of(number(step)) + int64(row) * R::kWordPitch + unit, word);
      } else {
        net.keep_hidden(cell(), row, unit, next);
        if constexpr (R::kCell == Cell::kLstm) net.keep_memory(cell(), row, unit, as_element<Element>(memory.memory[i]));
      }
      const int column = direction * R::kHidden + unit;
      if (layer + 1 < R::kLayers) sequence(layer)[(int64(at) * R::kBatch + row) * R::kBelow + column] = next;
      else net.keep_sequence(at, row, column, next);
    }
  }

  WS_INLINE float gates(int own, int row, int unit) const {
    const auto input = [&](int gate) {
      const int r = gate * R::kUnits + own;
      return memory.input_sum[r * R::kPadded + row] + memory.input_bias[r];
    };
    const auto hidden = [&](int gate) {
      const int r = gate * R::kUnits + own;
      return memory.hidden_sum[r * R::kPadded + row] + memory.hidden_bias[r];
    };
    if constexpr (R::kCell == Cell::kLstm) {
      float& state = memory.memory[row * R::kUnits + own];
      state = gate_of(input(1) + hidden(1)) * state + gate_of(input(0) + hidden(0)) * tanh(input(2) + hidden(2));
      return gate_of(input(3) + hidden(3)) * tanh(state);
    } else if constexpr (R::kCell == Cell::kGru) {
      const float reset = gate_of(input(0) + hidden(0)), update = gate_of(input(1) + hidden(1));
      const float made = tanh(input(2) + reset * hidden(2));
      return (memory.hidden[row * R::kHiddenPitch + unit] - made) * update + made;
    } else if constexpr (R::kCell == Cell::kTanh) {
      return tanh(input(0) + hidden(0));
    } else {
      return max(input(0) + hidden(0), 0.0f);
    }
  }
};

// The kernel: one CTA an SM, all at once. `sequences` has what a layer gives to the next, `words` are zero between calls.
template <class R, class Net> WS_INLINE void recurrent(const Net& net, typename R::Element* sequences, uint64* words) {
  extern __shared__ uint4 shared[];
  auto& memory = *reinterpret_cast<RecurrentMemory<R>*>(shared);
  const int position = blockIdx.x / R::kCtas, rank = blockIdx.x % R::kCtas;
#pragma unroll 1
  for (int first = 0; first < R::kLayers; first += R::kAtOnce) {
    const int layer = first + position / R::kDirections;
    if (layer < R::kLayers)
      RecurrentCell<R, Net>{net, memory, sequences, words, layer, position % R::kDirections, rank}.run();
  }
  __syncthreads();
  if (threadIdx.x == 0)
    memory.is_last = arrive(reinterpret_cast<unsigned*>(words + R::kCountersAt + R::kCells * R::kCounterWords)) == gridDim.x - 1;
  __syncthreads();
  if (!memory.is_last) return;
  for (int64 i = threadIdx.x; i < R::kWords; i += R::kThreads) words[i] = 0;
}

}  // namespace ws
