// ws_gelu: linear.default, gelu.default
// for all i0:1024, i1:8192; over j:4096
//   r0 = sum(x[4096 i0 + j] * p_linear_weight[4096 i1 + j])
//   gelu[8192 i0 + i1] = ((r0 + p_linear_bias[i1]) * 0.5) * (1 + erf(((r0 + p_linear_bias[i1]) * 0.707107)))
// cuda_product: engine = fp16x3, columns = 128, stages = 3, cluster = 1, raster = 8, promote = 1, warpgroups = 2, split_k = 1
using ws_gelu_shape = ws::MatrixProduct<ws::half, 2,
    ws::Extents{.batch = 1, .m = 1024, .n = 8192, .k = 4096, .slices = 1, .pack = 4},
    ws::Directions{ws::kAlong, ws::kAlong},
    ws::Tiling{.columns = 128, .stages = 3, .cluster = 1, .group = 8, .promote = 1, .warpgroups = 2}>;
constexpr ws::Operand ws_gelu_left{.batch = 1, .rows = 1024, .depth = 4096, .slices = 1,
    .row_stride = 4096, .depth_stride = 1, .wide = 4, .chunk = 64};
constexpr ws::Operand ws_gelu_right{.batch = 1, .rows = 8192, .depth = 4096, .slices = 1,
    .row_stride = 4096, .depth_stride = 1, .wide = 4, .chunk = 64};

struct ws_gelu_end {
  const float* __restrict__ p_linear_bias;
  float* __restrict__ gelu;
  WS_INLINE void operator()(int batch, int m, int n_begin, ws::Pack<float, 4> sums) const {
    ws::Pack<float, 4> gelu_pack;
    const ws::Pack<float, 4> p_linear_bias_pack = ws::load<4, ws::kShared>(p_linear_bias + n_begin);
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float total = sums[e] + p_linear_bias_pack[e];
      gelu_pack[e] = (total * 0.5f) * (1.0f + ws::erf(total * 0.7071067811865476f));
    }
    ws::store(gelu + (8192 * m + n_begin), gelu_pack);
  }
};

extern "C" __global__ void __launch_bounds__(ws::kSplitThreads) ws_gelu_split(
    const float* __restrict__ left, const float* __restrict__ right, ws::half* __restrict__ left_halves,
    ws::half* __restrict__ right_halves, float* __restrict__ left_roots, float* __restrict__ right_roots,
    ws::Marks* marks) {
  if (blockIdx.x < 1024) ws::split_along<ws_gelu_left>(blockIdx.x, left, left_halves, left_roots, marks);
  else ws::split_along<ws_gelu_right>(blockIdx.x - 1024, right, right_halves, right_roots, marks);
}

extern "C" __global__ void __launch_bounds__(ws_gelu_shape::kThreads, 1) ws_gelu_product(
    const __grid_constant__ ws::TensorMap left, const __grid_constant__ ws::TensorMap right,
    const float* __restrict__ left_roots, const float* __restrict__ right_roots,
    const float* __restrict__ p_linear_bias, float* __restrict__ gelu) {
  ws::multiply<ws_gelu_shape>(left, right, left_roots, right_roots, ws_gelu_end{p_linear_bias, gelu});
}

extern "C" __global__ void __launch_bounds__(ws::kSimtThreads) ws_gelu_repair(
    const float* __restrict__ left, const float* __restrict__ right, const float* __restrict__ left_roots,
    const float* __restrict__ right_roots, ws::Marks* marks, const float* __restrict__ p_linear_bias,
    float* __restrict__ gelu) {
  ws::repair<ws_gelu_shape, ws_gelu_left, ws_gelu_right>(left, right, left_roots, right_roots, marks,
             ws_gelu_end{p_linear_bias, gelu});
}
