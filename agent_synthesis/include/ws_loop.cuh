// A loop of any recurrent cell in one kernel, for sm_80 and later: what `ws_recurrent.cuh` is for LSTM, GRU and plain cells.
//
// A step has stages. In each a vector of the cell's units, the state or what a step has made of it, is multiplied by weights
// that CTAs hold in registers from the first step to the last, each the rows of some units; then a CTA computes for its own
// units, one by one, the vector of the next stage or the next states. Vectors travel as there, by words that carry a number: who
// tells one has read all of the one before, so two sets of words are enough. Own states stay in registers, and what a step is
// given is on its way while words travel.
#pragma once
#include "ws_recurrent.cuh"

namespace ws {

struct LoopSizes {
  int steps, batch, hidden, states;
};
// `padded`: rows of the batch that a stage multiplies at most. `first_state`: whether the first stage multiplies the first state,
// which a step leaves for the next.
struct LoopTiling {
  int ctas, units, threads, padded;
  bool first_state;
};

// Products of one vector: `gates` for each unit; `chunk` of the batch whose sums a thread has at a time.
template <int kUnits, int kThreads, int kBatch, int kGates_, int kChunk_> struct LoopStage {
  static constexpr int kGates = kGates_, kChunk = kChunk_, kRows = kGates * kUnits, kWarps = kThreads / 32;
  static constexpr int kWarpRows = (kRows + kWarps - 1) / kWarps, kPadded = (kBatch + kChunk - 1) / kChunk * kChunk;
};

// The loop's numbers. `Net` has pointers and strides, and what a step computes for one unit:
//   begin<state>(row, unit), weight<stage>(gate, unit, column): elements of what is given;
//   given(step, row, unit), fixed(row, unit): what a step reads beside its states, and what all steps read, as a struct each;
//   operand<stage>(given, fixed, state, sum): an element of a stage's vector; next(given, fixed, state, sum): has the states be
//       those after the step; `sum` has what the stages before have multiplied, a number for each gate of all;
//   keep<state>(step, row, unit, value): what to store.
template <class T, LoopSizes kSizes, LoopTiling kTiling, class... Stages> struct Loop {
  using Element = T;
  static constexpr int kSteps = kSizes.steps, kBatch = kSizes.batch, kHidden = kSizes.hidden, kStates = kSizes.states;
  static constexpr int kCtas = kTiling.ctas, kUnits = kTiling.units, kThreads = kTiling.threads;
  static constexpr bool kFirstState = kTiling.first_state;
  static constexpr int kStages = sizeof...(Stages), kGates = (Stages::kGates + ...);
  static constexpr int kVectors = (kHidden + 127) / 128, kHiddenPitch = 128 * kVectors;
  static constexpr int kPadded = kTiling.padded;
  static constexpr int kSums = ((Stages::kRows * Stages::kPadded) + ...);
  static constexpr int kWordPitch = (kHidden + 1) / 2 * 2;        // words of a row of the batch
  static constexpr int64 kSetWords = int64(kBatch) * kWordPitch;  // of a vector
  static constexpr int64 kWords = 2 * kSetWords + 16;             // the last are a counter
  static constexpr int kOwn = (kUnits * kBatch + kThreads - 1) / kThreads;  // elements of a thread
};

template <class L> struct LoopMemory {
  alignas(16) float hidden[L::kPadded * L::kHiddenPitch];
  float sum[L::kSums];
  bool is_last;
};

template <class L, class Net> struct LoopRun {
  using Element = typename L::Element;
  const Net& net;
  LoopMemory<L>& memory;
  uint64* words;
  int rank;
  unsigned number = 0;  // of the vector that was told last
  typename Net::Given given[L::kOwn];
  typename Net::Fixed fixed[L::kOwn];
  float state[L::kOwn][L::kStates], sum[L::kOwn][L::kGates];

  WS_INLINE int first_unit() const { return rank * L::kUnits; }
  WS_INLINE uint64* set_of(unsigned of) const { return words + of % 2 * L::kSetWords; }

  // Calls visit(i, own, row, unit) for the elements of this thread: unit `own` of the CTA.
  template <class Visit> WS_INLINE void each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < L::kOwn; ++i) {
      const int place = i * L::kThreads + threadIdx.x, own = place % L::kUnits, row = place / L::kUnits;
      if (row < L::kBatch && first_unit() + own < L::kHidden) visit(i, own, row, first_unit() + own);
    }
  }

  template <int kState> WS_INLINE void begin_state() {
    if constexpr (kState < L::kStates) {
      each([&](int i, int, int row, int unit) { state[i][kState] = as_float(net.template begin<kState>(row, unit)); });
      begin_state<kState + 1>();
    }
  }
  template <int kState> WS_INLINE void keep_state(int step, int i, int row, int unit) const {
    if constexpr (kState < L::kStates) {
      net.template keep<kState>(step, row, unit, as_element<Element>(state[i][kState]));
      keep_state<kState + 1>(step, i, row, unit);
    }
  }

  WS_INLINE void begin() {
    for (int i = threadIdx.x; i < L::kPadded * L::kHiddenPitch; i += L::kThreads) {
      const int row = i / L::kHiddenPitch, unit = i % L::kHiddenPitch;
      const bool exists = L::kFirstState && row < L::kBatch && unit < L::kHidden;
      memory.hidden[i] = exists ? as_float(net.template begin<0>(row, unit)) : 0.0f;
    }
    begin_state<0>();
    each([&](int i, int, int row, int unit) { fixed[i] = net.fixed(row, unit); });
  }

  WS_INLINE void tell(int row, int unit, float value) const {
    const uint64 word = uint64(number) << 32 | static_cast<unsigned>(__float_as_int(value));
    ptx::store_relaxed(set_of(number) + int64(row) * L::kWordPitch + unit, word);
  }
  WS_INLINE void hear() { fetch_words<L>(set_of(number), number, memory.hidden); }

  WS_INLINE void end(int step) {
    const bool is_told = L::kFirstState && step + 1 < L::kSteps;
    if (is_told) ++number;
    each([&](int i, int, int row, int unit) {
      net.next(given[i], fixed[i], state[i], sum[i]);
      if (is_told) {
        state[i][0] = as_float(as_element<Element>(state[i][0]));
        tell(row, unit, state[i][0]);
      }
      keep_state<0>(step, i, row, unit);
    });
  }
};

// Stages from `kStage` on: their weights, and what they do in a step. `kGate`, `kSum`: gates and sums of those before.
template <class L, class Net, int kStage, int kGate, int kSum, class... Stages> struct LoopChain {
  WS_INLINE void load(const LoopRun<L, Net>&) {}
  WS_INLINE void step(LoopRun<L, Net>&, int) const {}
};
template <class L, class Net, int kStage, int kGate, int kSum, class S, class... Others>
struct LoopChain<L, Net, kStage, kGate, kSum, S, Others...> {
  float weight[S::kWarpRows][4 * L::kVectors];
  LoopChain<L, Net, kStage + 1, kGate + S::kGates, kSum + S::kRows * S::kPadded, Others...> others;

  WS_INLINE void load(const LoopRun<L, Net>& run) {
#pragma unroll
    for (int r = 0; r < S::kWarpRows; ++r) {
      const int row = threadIdx.x / 32 * S::kWarpRows + r, unit = run.first_unit() + row % L::kUnits;
      const bool exists = row < S::kRows && unit < L::kHidden;
#pragma unroll
      for (int c = 0; c < 4 * L::kVectors; ++c) {
        const int column = c / 4 * 128 + threadIdx.x % 32 * 4 + c % 4;
        weight[r][c] = exists && column < L::kHidden
            ? as_float(run.net.template weight<kStage>(row / L::kUnits, unit, column)) : 0.0f;
      }
    }
    others.load(run);
  }

  WS_INLINE void step(LoopRun<L, Net>& run, int step) const {
    constexpr bool kIsState = L::kFirstState && kStage == 0;
    if constexpr (!kIsState) {
      ++run.number;
      run.each([&](int i, int, int row, int unit) {
        run.tell(row, unit, run.net.template operand<kStage>(run.given[i], run.fixed[i], run.state[i], run.sum[i]));
      });
    }
    if (!kIsState || step > 0) run.hear();
    __syncthreads();
    multiply<S, L::kVectors>(weight, run.memory.hidden, run.memory.sum + kSum);
    __syncthreads();
    run.each([&](int i, int own, int row, int) {
#pragma unroll
      for (int g = 0; g < S::kGates; ++g)
        run.sum[i][kGate + g] = run.memory.sum[kSum + (g * L::kUnits + own) * S::kPadded + row];
    });
    others.step(run, step);
  }
};

// The kernel: one CTA an SM, all at once. `words` are zero between calls.
template <class L, class Net, class... Stages> WS_INLINE void loop(const Net& net, uint64* words) {
  extern __shared__ uint4 shared[];
  auto& memory = *reinterpret_cast<LoopMemory<L>*>(shared);
  LoopRun<L, Net> run{net, memory, words, int(blockIdx.x)};
  LoopChain<L, Net, 0, 0, 0, Stages...> chain;
  chain.load(run);
  run.begin();
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < L::kSteps; ++step) {
    run.each([&](int i, int, int row, int unit) { run.given[i] = net.given(step, row, unit); });
    chain.step(run, step);
    run.end(step);
  }
  __syncthreads();
  if (threadIdx.x == 0) memory.is_last = arrive(reinterpret_cast<unsigned*>(words + 2 * L::kSetWords)) == gridDim.x - 1;
  __syncthreads();
  if (!memory.is_last) return;
  for (int64 i = threadIdx.x; i < L::kWords; i += L::kThreads) words[i] = 0;
}

}  // namespace ws
