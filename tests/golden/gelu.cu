// gelu: one fused group
// for all i:1048576
//   y[i] = x[i] * (1 + erf((x[i] * 0.707107)))
// cuda_pointwise: loads = cached, stores = plain, exp = accurate, dependent_launch = yes, by_rows = no, threads = 256, vectors = 1, vector_width = 4
struct gelu_pointwise {
  const float* __restrict__ x;
  float* __restrict__ y;

  using Offset = int;
  static constexpr ws::PointwiseTiling kTiling{.threads = 256, .items = 1, .vector_width = 4, .row_vectors = 262144,
      .by_rows = false, .overlap = true};
  using Outer = ws::Axes<1>;
  using Loads = ws::List<ws::Pack<float, 4>>;

  WS_INLINE ws::Pack<float, 4> load(ws::VectorLoad<0>, const int (&at)[1], int i_begin) const {
    return ws::load<4, ws::kShared>(x + i_begin);
  }
  WS_INLINE void compute(const int (&at)[1], int i_begin, const ws::Pack<float, 4>& x_pack) const {
    ws::Pack<float, 4> y_pack;
    #pragma unroll
    for (int e = 0; e < 4; ++e) {
      y_pack[e] = x_pack[e] * (1.0f + ws::erf(x_pack[e] * 0.70710678f));
    }
    ws::store(y + i_begin, y_pack);
  }
};

extern "C" __global__ void __launch_bounds__(256, 1) gelu(const float* __restrict__ x, float* __restrict__ y) {
  ws::compute_pointwise(gelu_pointwise{x, y});
}
