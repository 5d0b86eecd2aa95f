// gelu: one fused group
// for all i:1048576
//   y[i] = x[i] * (1 + erf((x[i] * 0.707107)))
// cuda_pointwise: loads = shared, stores = plain, exp = accurate, overlap = yes, threads = 256, items = 1, pack = 4
extern "C" __global__ void __launch_bounds__(256, 1) gelu(const float* __restrict__ x, float* __restrict__ y) {
  ws::wait_for_previous();
  ws::launch_dependents();
  constexpr int kPacks = 262144;
  const int pack = blockIdx.x * 256 + threadIdx.x;
  const int i_begin = 4 * pack;
  ws::Pack<float, 4> y_pack;
  const ws::Pack<float, 4> x_pack = ws::load<4, ws::kShared>(x + i_begin);
  #pragma unroll
  for (int e = 0; e < 4; ++e) {
    y_pack[e] = x_pack[e] * (1.0f + ws::erf(x_pack[e] * 0.70710678f));
  }
  ws::store(y + i_begin, y_pack);
}
