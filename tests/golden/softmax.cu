// softmax: one fused group
// for all i:4096; over j:16384
//   row_max = max(x[16384 i + j])
//   row_sum = sum(exp((x[16384 i + j] - row_max)))
//   y[16384 i + j] = exp((x[16384 i + j] - row_max)) / row_sum
// cuda_row_reduction: reduce = block, merge = yes, loads = cached, stores = plain, preload = no, dependent_launch = yes, exp = fast, threads = 512, lanes = 512, ctas = 1, vector_width = 4, vectors = 8, min_blocks = 2, stages = 0, lag = 0, held = 0
struct softmax_row : ws::RowBase {
  using Index = int;
  const float* __restrict__ x;
  float* __restrict__ y;
  int i;
  float row_max;
  float row_sum;
  float rescale;
  float reciprocal;
  enum Load : ws::LoadSet { kX = 1ull };
  struct Vector {
    ws::Pack<float, 4> x;
    ws::Pack<float, 4> kept;
  };
  static constexpr int kLoadBytes[] = {16};
  template <ws::LoadSet kLoads, class Visit>
  WS_INLINE void each_load(int j_begin, const Visit& visit) const {
    if constexpr (kLoads & kX) visit(ws::RowLoad<kX, &Vector::x, ws::kShared>(), x + (16384 * i + j_begin));
  }
  using Stages = ws::RowStages<ws::RowStage<ws::ShiftedSum<float, true>, kX, kX>>;
  WS_INLINE void at(int row) { i = row; }
  template <class State>
  WS_INLINE void learn(ws::RowNumber<0>, const State& state, const State& own) {
    row_max = state.greatest;
    row_sum = state.total();
    rescale = State::exponential(own.greatest - row_max);
    reciprocal = 1.0f / row_sum;
  }
  WS_INLINE float top(ws::RowNumber<0>, Vector& vector, int j, int e) const { return vector.x[e]; }
  WS_INLINE float term(ws::RowNumber<0>, Vector& vector, int j, int e, float pivot) const {
    vector.kept[e] = ws::fast_exp(vector.x[e] - pivot);
    return vector.kept[e];
  }
  struct Stored { ws::Pack<float, 4> y; };
  static constexpr ws::LoadSet kStoreLoads = kX;
  WS_INLINE void finish(Stored& stored, Vector& vector, int j, int e) const {
    stored.y[e] = (vector.kept[e] * rescale) * reciprocal;
  }
  template <class Visit>
  WS_INLINE void each_store(Stored& stored, int j_begin, const Visit& visit) const {
    visit(stored.y, y + (16384 * i + j_begin));
  }
};

constexpr ws::RowTiling softmax_tiling{
    .rows = 4096, .columns = 16384, .threads = 512, .lanes = 512, .ctas = 1, .vector_width = 4, .vectors = 8,
    .slice = 16384, .overlap = true};

extern "C" __global__ void __launch_bounds__(512, 2) softmax(const float* __restrict__ x, float* __restrict__ y) {
  __shared__ ws::StageBoxes<softmax_row, ws::plain_places(softmax_tiling, ws::kOverCta)> boxes;
  ws::plain_rows<softmax_tiling, ws::kOverCta>(softmax_row{{}, x, y}, boxes);
}
