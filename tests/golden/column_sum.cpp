// column_sum: one fused group
// for all j:4096; over i:512
//   all = sum(x[4096 i + j])
//   y[j] = all
// cpu_column_reduction: reduce = split, stores = plain, tile = 2048, threads = 0
extern "C" void column_sum(void* const* arguments) {
  const float* __restrict x = static_cast<const float*>(arguments[0]);
  float* __restrict y = static_cast<float*>(arguments[1]);
  double* __restrict all_pieces = static_cast<double*>(arguments[2]);
  constexpr long kJExtent = 4096;
  constexpr long kTile = 2048;
  constexpr long kPieces = 16;

  #pragma omp parallel for schedule(static) collapse(2)
  for (long piece = 0; piece < kPieces; ++piece) {
    for (long j_begin = 0; j_begin < kJExtent; j_begin += kTile) {
      const long j_end = j_begin + kTile;
      const long i_first = piece * 512 / kPieces;
      const long i_last = (piece + 1) * 512 / kPieces;
      alignas(64) double all_total[kTile];
      ws::fill(all_total, 0.0);
      for (long i_begin = i_first; i_begin < i_last; i_begin += 32) {
        const long i_end = i_begin + 32 < i_last ? i_begin + 32 : i_last;
        alignas(64) float all_tile[kTile];
        ws::fill(all_tile, 0.0f);
        for (long i = i_begin; i < i_end; ++i) {
          ws::ask_for(x + 4096 * (i + 1) + j_begin, j_end - j_begin);
          #pragma omp simd
          for (long j = j_begin; j < j_end; ++j) {
            all_tile[j - j_begin] += x[4096 * i + j];
          }
        }
        #pragma omp simd
        for (long j = j_begin; j < j_end; ++j) all_total[j - j_begin] += all_tile[j - j_begin];
      }
      #pragma omp simd
      for (long j = j_begin; j < j_end; ++j) all_pieces[piece * 4096 + j] = all_total[j - j_begin];
    }
  }
  #pragma omp parallel for schedule(static)
  for (long j_begin = 0; j_begin < kJExtent; j_begin += kTile) {
    const long j_end = j_begin + kTile;
    alignas(64) double all_total[kTile];
    ws::fill(all_total, 0.0);
    for (long piece = 0; piece < kPieces; ++piece) {
      #pragma omp simd
      for (long j = j_begin; j < j_end; ++j) all_total[j - j_begin] = ws::Sum::of<double>(all_total[j - j_begin], all_pieces[piece * 4096 + j]);
    }
    alignas(64) float all_tile[kTile];
    #pragma omp simd
    for (long j = j_begin; j < j_end; ++j) all_tile[j - j_begin] = static_cast<float>(all_total[j - j_begin]);
    #pragma omp simd
    for (long j = j_begin; j < j_end; ++j) {
      y[j] = all_tile[j - j_begin];
    }
  }
}
