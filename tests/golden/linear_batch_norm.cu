// ws_relu: linear.default, mul.Tensor, batch_norm.default, relu.default
// for all i:256; over j:192
//   r0 = at every element, sum of 64 x[64 j] * p_linear_weight[64 i]
//   r1 = at every element, sum of 64 x[0] * p_linear_weight[64 i]
//   r2 = sum(f64((((r0 + p_linear_bias[i]) * p_scale[i]) - where(isinf(((r1 + p_linear_bias[i]) * p_scale[i])), 0, ((r1 + p_linear_bias[i]) * p_scale[i])))))
//   r3 = sum(((((r0 + p_linear_bias[i]) * p_scale[i]) - where(isinf(((r1 + p_linear_bias[i]) * p_scale[i])), 0, ((r1 + p_linear_bias[i]) * p_scale[i]))) - f32((r2 / 192))) …)
//   relu[i + 256 j] = max(((((((r0 + p_linear_bias[i]) * p_scale[i]) - f32((f64(where(isinf(((r1 + p_linear_bias[i]) * p_scale[i])), 0, ((r1 + p_linear_bias[i]) * p_scale[i]))) + (r…
//   b_norm_running_mean[i] = (f32((f64(where(isinf(((r1 + p_linear_bias[i]) * p_scale[i])), 0, ((r1 + p_linear_bias[i]) * p_scale[i]))) + (r2 / 192))) * 0.1) + (b_norm_running_mean[i] * 0.…
//   b_norm_running_var[i] = (((r3 / 192) * 1.00524) * 0.1) + (b_norm_running_var[i] * 0.9)
// cuda_product_columns: engine = fp16x3, columns = 128, stages = 3, cluster = 1, raster = 8, promote = 1, warpgroups = 2, split_k = 1
using ws_relu_shape = ws::MatrixProduct<ws::half, 2,
    ws::Extents{.batch = 1, .m = 192, .n = 256, .k = 64, .slices = 1, .pack = 4},
    ws::Directions{ws::kAlong, ws::kAlong},
    ws::Tiling{.columns = 128, .stages = 3, .cluster = 1, .group = 8, .promote = 1, .warpgroups = 2}>;
constexpr ws::Operand ws_relu_left{.batch = 1, .rows = 192, .depth = 64, .slices = 1,
    .row_stride = 64, .depth_stride = 1, .wide = 4, .chunk = 64};
constexpr ws::Operand ws_relu_right{.batch = 1, .rows = 256, .depth = 64, .slices = 1,
    .row_stride = 64, .depth_stride = 1, .wide = 4, .chunk = 64};

struct ws_relu_end {
  float* __restrict__ states;
  const float* __restrict__ p_linear_bias;
  const float* __restrict__ p_scale;
  float* __restrict__ ws_relu_values;
  WS_INLINE ws::Pack<float, 4> operator()(int batch, int m, int n_begin, ws::Pack<float, 4> sums) const {
    ws::Pack<float, 4> values = {};
    ws::Pack<float, 4> ws_relu_values_pack;
    const ws::Pack<float, 4> p_linear_bias_pack = ws::load<4, ws::kShared>(p_linear_bias + n_begin);
    const ws::Pack<float, 4> p_scale_pack = ws::load<4, ws::kShared>(p_scale + n_begin);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float total = sums[e] + p_linear_bias_pack[e];
      const float product = total * p_scale_pack[e];
      values[e] = product;
      ws_relu_values_pack[e] = product;
    }
    ws::store(ws_relu_values + (256 * m + n_begin), ws_relu_values_pack);
    return values;
  }
  WS_INLINE float stored(int m, int n) const {
    return ws_relu_values[256 * m + n];
  }
  WS_INLINE void repaired(int row, int column, int columns) const {
    ws::states_of_stored<ws_relu_shape>(*this, row, column, columns);
  }
};

extern "C" __global__ void __launch_bounds__(ws::kSplitThreads) ws_relu_split(
    const float* __restrict__ left, const float* __restrict__ right, ws::half* __restrict__ left_halves,
    ws::half* __restrict__ right_halves, float* __restrict__ left_roots, float* __restrict__ right_roots,
    ws::Marks* marks) {
  if (blockIdx.x < 24) ws::split_along<ws_relu_left>(blockIdx.x, left, left_halves, left_roots, marks);
  else ws::split_along<ws_relu_right>(blockIdx.x - 24, right, right_halves, right_roots, marks);
}

extern "C" __global__ void __launch_bounds__(ws_relu_shape::kThreads, 1) ws_relu_product(
    const __grid_constant__ ws::TensorMap left, const __grid_constant__ ws::TensorMap right,
    const float* __restrict__ left_roots, const float* __restrict__ right_roots, float* __restrict__ states,
    const float* __restrict__ p_linear_bias, const float* __restrict__ p_scale,
    float* __restrict__ ws_relu_values) {
  ws::multiply_columns<ws_relu_shape>(left, right, left_roots, right_roots, ws_relu_end{states, p_linear_bias, p_scale, ws_relu_values});
}

extern "C" __global__ void __launch_bounds__(ws::kSimtThreads) ws_relu_repair(
    const float* __restrict__ left, const float* __restrict__ right, const float* __restrict__ left_roots,
    const float* __restrict__ right_roots, ws::Marks* marks, float* __restrict__ states,
    const float* __restrict__ p_linear_bias, const float* __restrict__ p_scale,
    float* __restrict__ ws_relu_values) {
  ws::repair<ws_relu_shape, ws_relu_left, ws_relu_right>(left, right, left_roots, right_roots, marks,
             ws_relu_end{states, p_linear_bias, p_scale, ws_relu_values});
}

extern "C" __global__ void __launch_bounds__(256, 1) ws_relu_columns(
    float* b_norm_running_mean, float* b_norm_running_var, const float* __restrict__ ws_relu_values,
    float* __restrict__ ws_relu_part0, float* __restrict__ ws_relu_part1, const float* states) {
  const int column = blockIdx.x * ws::kJoinedColumns + threadIdx.x % ws::kJoinedColumns;
  const ws::ColumnTotal total = ws::joined_column<ws_relu_shape>(states, column);
  if (threadIdx.x >= ws::kJoinedColumns || column >= 256) return;
  const int i = column;
  const float ws_relu_values_at = ws_relu_values[i];
  const float chosen = ws::isinf(ws_relu_values_at) ? 0.0f : ws_relu_values_at;
  const double shifted = (total.mean - chosen) * 192;
  const float cast_value = static_cast<float>(static_cast<double>(chosen) + (shifted / 192.0));
  b_norm_running_mean[i] = (cast_value * 0.1f) + (b_norm_running_mean[i] * 0.9f);
  const float ratio = static_cast<float>(total.squares) / 192.0f;
  b_norm_running_var[i] = ((ratio * 1.0052356020942408f) * 0.1f) + (b_norm_running_var[i] * 0.9f);
  ws_relu_part0[i] = ws::rsqrt(ratio + 1e-05f);
  ws_relu_part1[i] = cast_value;
}

// ws_relu_normalized: linear.default, mul.Tensor, batch_norm.default, relu.default
// for all j:192, i:256
//   relu[i + 256 j] = max(((((ws_relu_values[i + 256 j] - ws_relu_part1[i]) * ws_relu_part0[i]) * p_norm_weight[i]) + p_norm_bias[i]), 0)
// cuda_pointwise: loads = cached, stores = plain, exp = accurate, dependent_launch = yes, by_rows = no, threads = 256, vectors = 1, vector_width = 4
struct ws_relu_normalized_pointwise {
  const float* __restrict__ p_norm_weight;
  const float* __restrict__ p_norm_bias;
  float* __restrict__ relu;
  const float* __restrict__ ws_relu_values;
  const float* __restrict__ ws_relu_part0;
  const float* __restrict__ ws_relu_part1;

  using Offset = int;
  static constexpr ws::PointwiseTiling kTiling{.threads = 256, .items = 1, .vector_width = 4, .row_vectors = 64,
      .by_rows = false, .overlap = true};
  using Outer = ws::Axes<192>;
  using Loads = ws::List<ws::Pack<float, 4>, ws::Pack<float, 4>, ws::Pack<float, 4>, ws::Pack<float, 4>, ws::Pack<float, 4>>;

  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<0>, const int (&at)[1], int i_begin) const {
    const auto& [j] = at;
    return ws::load<4, ws::kShared>(ws_relu_values + (i_begin + 256 * j));
  }
  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<1>, const int (&at)[1], int i_begin) const {
    const auto& [j] = at;
    return ws::load<4, ws::kShared>(ws_relu_part1 + i_begin);
  }
  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<2>, const int (&at)[1], int i_begin) const {
    const auto& [j] = at;
    return ws::load<4, ws::kShared>(ws_relu_part0 + i_begin);
  }
  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<3>, const int (&at)[1], int i_begin) const {
    const auto& [j] = at;
    return ws::load<4, ws::kShared>(p_norm_weight + i_begin);
  }
  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<4>, const int (&at)[1], int i_begin) const {
    const auto& [j] = at;
    return ws::load<4, ws::kShared>(p_norm_bias + i_begin);
  }
  WS_INLINE void compute(const int (&at)[1], int i_begin, const ws::Pack<float, 4>& ws_relu_values_pack,
      const ws::Pack<float, 4>& ws_relu_part1_pack, const ws::Pack<float, 4>& ws_relu_part0_pack, const ws::Pack<float,
      4>& p_norm_weight_pack, const ws::Pack<float, 4>& p_norm_bias_pack) const {
    const auto& [j] = at;
    ws::Pack<float, 4> relu_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float product = ((ws_relu_values_pack[e] - ws_relu_part1_pack[e]) * ws_relu_part0_pack[e]) * p_norm_weight_pack[e];
      relu_pack[e] = ws::max<float>(product + p_norm_bias_pack[e], 0.0f);
    }
    ws::store(relu + (i_begin + 256 * j), relu_pack);
  }
};

extern "C" __global__ void __launch_bounds__(256, 1) ws_relu_normalized(
    const float* __restrict__ p_norm_weight, const float* __restrict__ p_norm_bias, float* __restrict__ relu,
    const float* __restrict__ ws_relu_values, const float* __restrict__ ws_relu_part0,
    const float* __restrict__ ws_relu_part1) {
  ws::compute_pointwise(ws_relu_normalized_pointwise{p_norm_weight, p_norm_bias, relu, ws_relu_values, ws_relu_part0,
      ws_relu_part1});
}
