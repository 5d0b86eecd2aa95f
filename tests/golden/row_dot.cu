// row_dot: one fused group
// for all i:1; over j:1048576
//   total = sum(x[1048576 i + j] * s[j])
//   y[i] = total
// cuda_row_reduction: reduce = two_kernels, merge = no, loads = cached, stores = plain, preload = no, dependent_launch = yes, exp = accurate, threads = 512, lanes = 512, ctas = 128, vector_width = 4, vectors = 4, min_blocks = 1, stages = 0, lag = 0, held = 0
struct row_dot_row : ws::RowBase {
  static constexpr bool kStoresElements = false;
  using Index = int;
  const float* __restrict__ x;
  const float* __restrict__ s;
  float* __restrict__ y;
  float total;
  enum Load : ws::LoadSet { kX = 1ull, kS = 2ull };
  static constexpr ws::LoadSet kCommon = kX | kS;
  struct Vector {
    ws::Pack<float, 4> x;
    ws::Pack<float, 4> s;
  };
  static constexpr int kLoadBytes[] = {16, 16};
  template <ws::LoadSet kLoads, class Visit>
  WS_INLINE void each_load(int j_begin, const Visit& visit) const {
    if constexpr (kLoads & kX) visit(ws::RowLoad<kX, &Vector::x, ws::kShared>(), x + j_begin);
    if constexpr (kLoads & kS) visit(ws::RowLoad<kS, &Vector::s, ws::kShared>(), s + j_begin);
  }
  using Stages = ws::RowStages<ws::RowStage<ws::Fold<ws::Sum, float>, kX | kS>>;
  WS_INLINE void at(int row) {}
  template <class State>
  WS_INLINE void learn(ws::RowNumber<0>, const State& state, const State& own) { total = state.value; }
  WS_INLINE ws::Fold<ws::Sum, float> element(ws::RowNumber<0>, Vector& vector, int j, int e) const {
    return {vector.x[e] * vector.s[e]};
  }
  WS_INLINE void store_row() const { y[0] = total; }
};

constexpr ws::RowTiling row_dot_tiling{
    .rows = 1, .columns = 1048576, .threads = 512, .lanes = 512, .ctas = 128, .vector_width = 4, .vectors = 4,
    .slice = 8192, .overlap = true};

constexpr ws::RowTiling row_dot_stores{
    .rows = 1, .columns = 1048576, .threads = 32, .lanes = 32, .ctas = 1, .vector_width = 4, .vectors = 4,
    .slice = 1048576, .overlap = true};

extern "C" __global__ void __launch_bounds__(512, 1) row_dot_total(
    const float* __restrict__ x, const float* __restrict__ s, ws::Fold<ws::Sum, float>* total_partials) {
  __shared__ ws::StateOf<row_dot_row, 0> box[16];
  ws::leave_states<row_dot_tiling, 0, 0>(row_dot_row{{}, x, s, nullptr}, box, total_partials);
}

extern "C" __global__ void __launch_bounds__(32, 1) row_dot(
    const float* __restrict__ x, const float* __restrict__ s, float* __restrict__ y,
    const ws::Fold<ws::Sum, float>* total_partials) {
  ws::store_slices<row_dot_stores, false, 128>(row_dot_row{{}, x, s, y}, total_partials);
}
