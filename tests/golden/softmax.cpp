// softmax: softmax over the last dimension
// for all i:4096; over j:1024
//   row_max = max(x[1024 i + j])
//   row_sum = sum(exp((x[1024 i + j] - row_max)))
//   y[1024 i + j] = exp((x[1024 i + j] - row_max)) / row_sum
// cpu_row_reduction: reduce = rows, sweeps = cached, stores = plain, lanes = 64, block = 4096, threads = 0
extern "C" void softmax(void* const* arguments) {
  const float* __restrict x = static_cast<const float*>(arguments[0]);
  float* __restrict y = static_cast<float*>(arguments[1]);
  constexpr long kJExtent = 1024;
  constexpr long kLanes = 64;

  #pragma omp parallel
  {
    #pragma omp for schedule(static)
    for (long i = 0; i < 4096; ++i) {
      alignas(64) float row_max_lanes[kLanes];
      ws::fill(row_max_lanes, -ws::infinity<float>());
      ws::for_lanes<kLanes>(0, kJExtent, [&](long j, long lane) WS_BODY {
        row_max_lanes[lane] = ws::Maximum::of<float>(row_max_lanes[lane], x[1024 * i + j]);
      });
      const float row_max = ws::fold<ws::Maximum>(row_max_lanes);
      alignas(64) float row_sum_lanes[kLanes];
      ws::fill(row_sum_lanes, 0.0f);
      ws::for_lanes<kLanes>(0, kJExtent, [&](long j, long lane) WS_BODY {
        const float exp_value = ws::exp(x[1024 * i + j] - row_max);
        y[1024 * i + j] = exp_value;
        row_sum_lanes[lane] += exp_value;
      });
      const float row_sum = ws::fold<ws::Sum>(row_sum_lanes);
      const float reciprocal = 1.0f / row_sum;
      #pragma omp simd
      for (long j = 0; j < kJExtent; ++j) {
        y[1024 * i + j] = y[1024 * i + j] * reciprocal;
      }
    }
  }
}
