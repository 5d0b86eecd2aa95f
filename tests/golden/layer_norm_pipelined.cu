// layer_norm_pipelined: one fused group
// for all i:4096; over j:393216
//   total = sum(x[393216 i + j])
//   squares = sum((x[393216 i + j] - (total / 393216)) * (x[393216 i + j] - (total / 393216)))
//   y[393216 i + j] = (((x[393216 i + j] - (total / 393216)) * rsqrt(((squares / 393216) + 1e-05))) * weight[j]) + bias[j]
// cuda_row_reduction: reduce = pipelined, merge = yes, loads = evict_first, stores = streaming, preload = yes, dependent_launch = yes, exp = accurate, threads = 128, lanes = 128, ctas = 64, vector_width = 4, vectors = 12, min_blocks = 2, stages = 4, lag = 2, held = 0
struct layer_norm_pipelined_row : ws::RowBase {
  using Index = int;
  const float* __restrict__ x;
  const float* __restrict__ weight;
  const float* __restrict__ bias;
  float* __restrict__ y;
  int i;
  float total;
  float squares;
  float total_mean;
  float rsqrt;
  enum Load : ws::LoadSet { kX = 1ull, kWeight = 2ull, kBias = 4ull };
  static constexpr ws::LoadSet kCommon = kWeight | kBias;
  static constexpr ws::LoadSet kInRing = kX;
  struct Vector {
    ws::Pack<float, 4> x;
    ws::Pack<float, 4> weight;
    ws::Pack<float, 4> bias;
  };
  static constexpr int kLoadBytes[] = {16, 16, 16};
  template <ws::LoadSet kLoads, class Visit>
  WS_INLINE void each_load(int j_begin, const Visit& visit) const {
    if constexpr (kLoads & kX) visit(ws::RowLoad<kX, &Vector::x, ws::kOnce>(), x + (393216 * i + j_begin));
    if constexpr (kLoads & kWeight) visit(ws::RowLoad<kWeight, &Vector::weight, ws::kShared>(), weight + j_begin);
    if constexpr (kLoads & kBias) visit(ws::RowLoad<kBias, &Vector::bias, ws::kShared>(), bias + j_begin);
  }
  using Stages = ws::RowStages<ws::RowStage<ws::Moments<float, true>, kX, kX>>;
  WS_INLINE void at(int row) { i = row; }
  template <class State>
  WS_INLINE void learn(ws::RowNumber<0>, const State& state, const State& own) {
    total = state.mean * state.count;
    squares = state.squares;
    total_mean = state.mean;
    rsqrt = ws::rsqrt((squares / 393216.0f) + 1e-05f);
  }
  WS_INLINE float value(ws::RowNumber<0>, Vector& vector, int j, int e) const { return vector.x[e]; }
  WS_INLINE float square(ws::RowNumber<0>, Vector& vector, int j, int e, float mean) const {
    const float difference = vector.x[e] - mean;
    return difference * difference;
  }
  struct Stored { ws::Pack<float, 4> y; };
  static constexpr ws::LoadSet kStoreLoads = kX | kWeight | kBias;
  WS_INLINE void finish(Stored& stored, Vector& vector, int j, int e) const {
    const float total2 = (((vector.x[e] - total_mean) * rsqrt) * vector.weight[e]) + vector.bias[e];
    stored.y[e] = total2;
  }
  template <class Visit>
  WS_INLINE void each_store(Stored& stored, int j_begin, const Visit& visit) const {
    visit(stored.y, y + (393216 * i + j_begin));
  }
};

constexpr ws::RowTiling layer_norm_pipelined_tiling{
    .rows = 4096, .columns = 393216, .threads = 128, .lanes = 128, .ctas = 64, .vector_width = 4, .vectors = 12,
    .slice = 6144, .overlap = true, .preload = true, .streaming = true, .teams = 4, .depth = 4, .lag = 2};

extern "C" __global__ void __launch_bounds__(128, 2) layer_norm_pipelined(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ y, ws::uint64* mailboxes) {
  __shared__ ws::StageBoxes<layer_norm_pipelined_row, ws::pipelined_places(layer_norm_pipelined_tiling)> boxes;
  ws::pipelined_rows<layer_norm_pipelined_tiling>(layer_norm_pipelined_row{{}, x, weight, bias, y}, boxes, mailboxes);
}
