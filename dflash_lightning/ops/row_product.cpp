// y[r, n] = sum_k x[r, k] * w[n, k], float32, for few rows r: the matrix is read from memory once.
//
// w is stored in panels of COLUMNS outputs, [ceil(N / COLUMNS)][K][COLUMNS], so that a panel is one stream and a lane of
// a register is one output. The tile of sums stays in registers, and no lanes need to be added up at the end.

#include <cstdint>
#include <cstring>

// LANES of a register; ROWS of a tile, so that ROWS * WIDTH sums, WIDTH weights and a factor fit the registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, ROWS = 8;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
constexpr int WIDTH = 2;     // registers of a tile, side by side
constexpr int COLUMNS = 32;  // of a panel
constexpr int AHEAD = 64;    // prefetch so many k ahead; past the end it is a hint that nobody follows

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4)));

template <int R>
static void tile(const float *x, const float *w, float *y, int64_t columns, int64_t N, int64_t K) {
  Vector sums[R][WIDTH] = {};
  for (int64_t k = 0; k < K; k++, w += COLUMNS) {
    Vector weights[WIDTH];
    for (int v = 0; v < WIDTH; v++) {
      weights[v] = *reinterpret_cast<const Unaligned *>(w + v * LANES);
      __builtin_prefetch(w + v * LANES + AHEAD * COLUMNS);
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < WIDTH; v++) sums[r][v] += x[r * K + k] * weights[v];
  }
  for (int r = 0; r < R; r++) std::memcpy(y + r * N, sums[r], sizeof(float) * columns);
}

typedef void (*Tile)(const float *, const float *, float *, int64_t, int64_t, int64_t);
static const Tile TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>, tile<7>, tile<8>};

extern "C" void row_product(const float *x, const float *w, float *y, int64_t R, int64_t N, int64_t K) {
  const int64_t panels = (N + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    for (int64_t r = 0; r < R; r += ROWS) {
      const int64_t rows = R - r < ROWS ? R - r : ROWS;
      for (int64_t n = panel * COLUMNS; n < N && n < (panel + 1) * COLUMNS; n += WIDTH * LANES) {
        const int64_t columns = N - n < WIDTH * LANES ? N - n : WIDTH * LANES;
        const float *weights = w + panel * COLUMNS * K + (n - panel * COLUMNS);
        TILES[rows - 1](x + r * K, weights, y + r * N + n, columns, N, K);
      }
    }
  }
}
