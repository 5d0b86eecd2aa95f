// gelu_bias_mask: gelu of x plus bias, zero where the mask is false
// for all i:96, j:1000
//   y[1000 i + j] = where(mask[1000 i + j], ((0.5 * (x[1000 i + j] + bias[j])) * (1 + erf(((x[1000 i + j] + bias[j]) * 0.707107)))), 0)
// cpu_pointwise: stores = plain, loop = nested, block = 4096, threads = 0
struct gelu_bias_mask_elements {
  static constexpr ws::PointwiseTiling kTiling{.rows = 96, .columns = 1000, .tile_rows = 1, .block = 1000,
      .threads = 0};
  using Outer = ws::Space<>;
  const float* __restrict x;
  const float* __restrict bias;
  const std::uint8_t* __restrict mask;
  float* __restrict y;
  long i;
  WS_INLINE void locate(const long* at) { i = at[0]; }
  WS_INLINE void store(long j, long e) const {
    const float total = x[1000 * i + j] + bias[j];
    const float chosen = (mask[1000 * i + j] != 0) ? ((0.5f * total) * (1.0f + ws::erf(total * 0.7071067811865476f))) : 0.0f;
    y[1000 * i + j] = chosen;
  }
};

extern "C" void gelu_bias_mask(void* const* arguments) {
  ws::compute_pointwise(ws::bind<gelu_bias_mask_elements, 4>(arguments));
}
