// layer_norm_ring: one fused group
// for all i:16; over j:4194304
//   total = sum(x[4194304 i + j])
//   squares = sum((x[4194304 i + j] - (total / 4.1943e+06)) * (x[4194304 i + j] - (total / 4.1943e+06)))
//   y[4194304 i + j] = (((x[4194304 i + j] - (total / 4.1943e+06)) * rsqrt(((squares / 4.1943e+06) + 1e-05))) * weight[j]) + bias[j]
// cuda_row_reduction: reduce = ring, merge = yes, loads = evict_first, stores = streaming, preload = no, dependent_launch = yes, exp = accurate, threads = 512, lanes = 512, ctas = 128, vector_width = 4, vectors = 2, min_blocks = 1, stages = 14, lag = 12, held = 20
struct layer_norm_ring_row : ws::RowBase {
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
  static constexpr ws::LoadSet kTogether = kX;
  static constexpr ws::LoadSet kSharedByRows = kWeight | kBias;
  struct Vector {
    ws::Pack<float, 4> x;
    ws::Pack<float, 4> weight;
    ws::Pack<float, 4> bias;
  };
  static constexpr int kLoadBytes[] = {16, 16, 16};
  template <ws::LoadSet kLoads, class Visit>
  WS_INLINE void each_load(int j_begin, const Visit& visit) const {
    if constexpr (kLoads & kX) visit(ws::RowLoad<kX, &Vector::x, ws::kOnce>(), x + (4194304 * i + j_begin));
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
    rsqrt = ws::rsqrt((squares / 4194304.0f) + 1e-05f);
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
    visit(stored.y, y + (4194304 * i + j_begin));
  }
};

constexpr ws::RowTiling layer_norm_ring_tiling{
    .rows = 16, .columns = 4194304, .threads = 512, .lanes = 512, .ctas = 128, .vector_width = 4, .vectors = 2,
    .slice = 32768, .interleaved = true, .overlap = true, .streaming = true, .teams = 1, .depth = 14, .lag = 12,
    .held = 20};

extern "C" __global__ void __launch_bounds__(512, 1) layer_norm_ring(
    const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ y, ws::uint64* slots, ws::uint64* arrivals) {
  __shared__ ws::StageBoxes<layer_norm_ring_row, ws::ring_places(layer_norm_ring_tiling)> boxes;
  ws::ring_rows<layer_norm_ring_tiling>(layer_norm_ring_row{{}, x, weight, bias, y}, boxes, slots, arrivals);
}
