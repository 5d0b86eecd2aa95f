// gelu_bias_mask: gelu of x plus bias, zero where the mask is false
// for all i:96, j:1000
//   y[1000 i + j] = where(mask[1000 i + j], ((0.5 * (x[1000 i + j] + bias[j])) * (1 + erf(((x[1000 i + j] + bias[j]) * 0.707107)))), 0)
// cpu_pointwise: stores = plain, loop = nested, block = 4096, threads = 0
extern "C" void gelu_bias_mask(void* const* arguments) {
  const float* __restrict x = static_cast<const float*>(arguments[0]);
  const float* __restrict bias = static_cast<const float*>(arguments[1]);
  const std::uint8_t* __restrict mask = static_cast<const std::uint8_t*>(arguments[2]);
  float* __restrict y = static_cast<float*>(arguments[3]);
  constexpr long kJExtent = 1000;
  constexpr long kBlock = 1000;

  #pragma omp parallel for schedule(static) collapse(2)
  for (long i = 0; i < 96; ++i) {
    for (long j_begin = 0; j_begin < kJExtent; j_begin += kBlock) {
      const long j_end = j_begin + kBlock;
      #pragma omp simd
      for (long j = j_begin; j < j_end; ++j) {
        const float total = x[1000 * i + j] + bias[j];
        const float chosen = (mask[1000 * i + j] != 0) ? ((0.5f * total) * (1.0f + ws::erf(total * 0.7071067811865476f))) : 0.0f;
        y[1000 * i + j] = chosen;
      }
    }
  }
}
