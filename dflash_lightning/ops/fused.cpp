// Passes over rows for which PyTorch needs several operations each, forwards and backwards. Each names the formula that
// it computes; tests hold it against the same in PyTorch and in float64.
//
// Rows are float or bfloat16 (X, Y); what is computed in between is float. Rows are shared out among `threads`; sums over
// rows are added up in the order of the threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// A float without its last 16 bits. It is read as that float, and written rounded to the nearest, ties to even.
struct bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
  }
  void operator=(float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, sizeof wide);
    const uint32_t rounded = (wide + 0x7FFFu + (wide >> 16 & 1u)) >> 16;
    bits = static_cast<uint16_t>(x == x ? rounded : 0x7FC0u);  // rounding could turn a NaN into infinity
  }
};

// exp(x) for -87 <= x <= 88 to within two units in the last place, without a branch, so that loops of it vectorise.
// x = n ln 2 + r with |r| <= ln(2) / 2. Adding MAGIC rounds to a whole number, which then stands in the lowest bits.
// The polynomial is Cephes' expf. NaN stays NaN.
static inline float power(float x) {
  constexpr float MAGIC = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + MAGIC;
  const float n = shifted - MAGIC;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = static_cast<int32_t>((static_cast<uint32_t>(bits) << 23) + 0x3F800000u);
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

static inline float at_least(float x, float floor) { return x < floor ? floor : x; }  // NaN stays NaN
static inline float greater(float x, float most) { return x > most ? x : most; }

// -- softmax over a vocabulary ---------------------------------------------------------------------------------------

// top[r] = max_v x[r, v]; total[r] = sum_v exp(max(x[r, v] - top[r], floor)).
template <typename X>
void softmax_sums(const X *x, float *top, float *total, int64_t rows, int64_t V, float floor, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const X *row = x + r * V;
    float most = row[0], sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t v = 0; v < V; v++) most = greater(row[v], most);
    // Sums of a thousand numbers at a time, so that rounding does not grow with the vocabulary.
    for (int64_t begin = 0; begin < V; begin += 1024) {
      const int64_t end = begin + 1024 < V ? begin + 1024 : V;
      float part = 0.0f;
#pragma omp simd reduction(+ : part)
      for (int64_t v = begin; v < end; v++) part += power(at_least(row[v] - most, floor));
      sum += part;
    }
    top[r] = most;
    total[r] = sum;
  }
}

// out[r, v] = factor[r] exp(max(x[r, v] - top[r], floor)); out may be x.
template <typename X, typename Y>
void softmax_write(const X *x, const float *top, const float *factor, Y *out, int64_t rows, int64_t V, float floor,
                   int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const float most = top[r], scale = factor[r];
    const X *row = x + r * V;
    Y *to = out + r * V;
#pragma omp simd
    for (int64_t v = 0; v < V; v++) to[v] = scale * power(at_least(row[v] - most, floor));
  }
}

// -- norm, and norm with rotation ------------------------------------------------------------------------------------

// n = w x s with s = 1 / sqrt(mean(x^2) + eps). Without cos, y = n. With cos and sin [rows / heads, D], features i and
// i + D/2 of n are turned: y_i = n_i cos_i - n_j sin_i and y_j = n_j cos_j + n_i sin_j, j = i + D/2.
template <typename X, typename Y>
void norm_rows(const X *x, const float *w, const float *cos, const float *sin, Y *y, float *scale, int64_t rows,
               int64_t D, int64_t heads, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const X *row = x + r * D;
    Y *to = y + r * D;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < D; i++) {
      const float v = row[i];
      squares += v * v;
    }
    const float s = 1.0f / std::sqrt(squares / D + eps);
    scale[r] = s;
    if (cos == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < D; i++) to[i] = row[i] * s * w[i];
      continue;
    }
    const int64_t half = D / 2;
    const float *c = cos + r / heads * D, *t = sin + r / heads * D;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
      const float first = row[i] * s * w[i], second = row[i + half] * s * w[i + half];
      to[i] = first * c[i] - second * t[i];
      to[i + half] = second * c[i + half] + first * t[i + half];
    }
  }
}

// Gradients of norm_rows: gx [rows, D], and gw [threads, D], to be summed over threads, in double precision.
template <typename X, typename Y>
void norm_rows_back(const Y *g, const X *x, const float *w, const float *cos, const float *sin, const float *scale,
                    X *gx, double *gw, int64_t rows, int64_t D, int64_t heads, int64_t threads) {
  constexpr int64_t RUN = 64;  // rows whose share of gw is summed in float
  const int64_t half = D / 2;
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t thread = 0; thread < threads; thread++) {
    std::vector<float> buffer(2 * D);
    float *turned = buffer.data(), *share = buffer.data() + D;
    double *sum = gw + thread * D;
    for (int64_t i = 0; i < D; i++) sum[i] = 0.0;
    const int64_t last = rows * (thread + 1) / threads;
    for (int64_t begin = rows * thread / threads; begin < last; begin += RUN) {
      for (int64_t i = 0; i < D; i++) share[i] = 0.0f;
      for (int64_t r = begin; r < last && r < begin + RUN; r++) {
        const X *row = x + r * D;
        const Y *in = g + r * D;
        const float s = scale[r];
        if (cos == nullptr) {
#pragma omp simd
          for (int64_t i = 0; i < D; i++) turned[i] = in[i];
        } else {
          const float *c = cos + r / heads * D, *t = sin + r / heads * D;
#pragma omp simd
          for (int64_t i = 0; i < half; i++) {
            turned[i] = in[i] * c[i] + in[i + half] * t[i + half];
            turned[i + half] = in[i + half] * c[i + half] - in[i] * t[i];
          }
        }
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < D; i++) {
          share[i] += turned[i] * row[i] * s;
          turned[i] *= w[i];
          dot += turned[i] * row[i];
        }
        const float along = dot * s * s * s / D;
        X *to = gx + r * D;
#pragma omp simd
        for (int64_t i = 0; i < D; i++) to[i] = turned[i] * s - row[i] * along;
      }
      for (int64_t i = 0; i < D; i++) sum[i] += share[i];
    }
  }
}

// -- gated feed-forward ----------------------------------------------------------------------------------------------

static inline float sigmoid(float x) {
  const float e = power(at_least(x < 0.0f ? x : -x, -87.0f));  // exp(-|x|)
  return x < 0.0f ? e / (1.0f + e) : 1.0f / (1.0f + e);
}

// h = gate sigmoid(gate) up.
template <typename X>
void gated(const X *gate, const X *up, X *h, int64_t count, int64_t threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const float x = gate[i];
    h[i] = x * sigmoid(x) * up[i];
  }
}

// h once more, and its gradients: d gate = dh up (s + gate s (1 - s)), d up = dh gate s, with s = sigmoid(gate). They may
// be written over dh and h: `dgate` may be `dh`.
template <typename X>
void gated_back(const X *dh, const X *gate, const X *up, X *h, X *dgate, X *dup, int64_t count, int64_t threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const float in = dh[i], x = gate[i], u = up[i], s = sigmoid(x), act = x * s;
    h[i] = act * u;
    dup[i] = in * act;
    dgate[i] = in * u * (s + act * (1.0f - s));
  }
}

// -- attention over intervals ----------------------------------------------------------------------------------------

// Scores of `heads` x `blocks` x `groups` x `slots` rows stand in `parts` matrices with columns[p] columns each. A row of
// block n and slot k sees the columns ranges[n, k, p] = (first, end) of part p; what it does not see is not read.
struct Rows {
  int64_t heads, blocks, groups, slots, parts;
  int64_t count() const { return heads * blocks * groups * slots; }
};

static inline const int32_t *seen(const int32_t *ranges, const Rows &s, int64_t row) {
  const int64_t n = row / (s.groups * s.slots) % s.blocks, k = row % s.slots;
  return ranges + (n * s.slots + k) * s.parts * 2;
}

// Scores become probabilities of `scale` times the scores, 0 where a row does not see. lse[row] = log sum exp of what it
// sees.
template <typename X>
void attend(X *const *scores, const int64_t *columns, const int32_t *ranges, float *lse, const Rows *shape, float scale,
            int64_t threads) {
  const Rows s = *shape;
  const int64_t rows = s.count();
  int64_t width = 0;
  for (int64_t p = 0; p < s.parts; p++) width += columns[p];
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> buffer(width);  // what a row sees, of all parts
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      const int32_t *range = seen(ranges, s, r);
      float *e = buffer.data(), most = -INFINITY, total = 0.0f;
      int64_t count = 0;
      for (int64_t p = 0; p < s.parts; p++) {
        const int64_t length = range[2 * p + 1] - range[2 * p];
        const X *row = scores[p] + r * columns[p] + range[2 * p];
        float *to = e + count;
#pragma omp simd reduction(max : most)
        for (int64_t c = 0; c < length; c++) {
          to[c] = scale * row[c];
          most = greater(to[c], most);
        }
        count += length;
      }
#pragma omp simd reduction(+ : total)
      for (int64_t c = 0; c < count; c++) {
        e[c] = power(at_least(e[c] - most, -60.0f));
        total += e[c];
      }
      lse[r] = most + std::log(total);
      const float factor = 1.0f / total;
      for (int64_t p = 0; p < s.parts; p++) {
        X *row = scores[p] + r * columns[p];
        const int64_t first = range[2 * p], end = range[2 * p + 1];
        for (int64_t c = 0; c < first; c++) row[c] = 0.0f;
#pragma omp simd
        for (int64_t c = first; c < end; c++) row[c] = factor * e[c - first];
        for (int64_t c = end; c < columns[p]; c++) row[c] = 0.0f;
        e += end - first;
      }
    }
  }
}

// Scores become probabilities p once more, and dp, the gradients of those, becomes that of the scores:
// scale p (dp - sum over all columns of p dp).
template <typename X>
void attend_back(X *const *scores, X *const *dp, const int64_t *columns, const int32_t *ranges, const float *lse,
                 const Rows *shape, float scale, int64_t threads) {
  const Rows s = *shape;
  const int64_t rows = s.count();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const int32_t *range = seen(ranges, s, r);
    const float sum = lse[r];
    float dot = 0.0f;
    for (int64_t p = 0; p < s.parts; p++) {
      X *row = scores[p] + r * columns[p];
      const X *slope = dp[p] + r * columns[p];
      const int64_t first = range[2 * p], end = range[2 * p + 1];
      for (int64_t c = 0; c < first; c++) row[c] = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t c = first; c < end; c++) {
        const float e = power(at_least(scale * row[c] - sum, -60.0f));
        row[c] = e;
        dot += e * slope[c];
      }
      for (int64_t c = end; c < columns[p]; c++) row[c] = 0.0f;
    }
    for (int64_t p = 0; p < s.parts; p++) {
      const X *row = scores[p] + r * columns[p];
      X *slope = dp[p] + r * columns[p];
#pragma omp simd
      for (int64_t c = 0; c < columns[p]; c++) slope[c] = scale * row[c] * (slope[c] - dot);
    }
  }
}

// -- names for callers in Python -------------------------------------------------------------------------------------

// A pass whose rows are all of one type: `gated_float`. One that reads X and writes Y: `norm_rows_float_bfloat16`.
#define OF_ONE(X)                                                                                                      \
  extern "C" void softmax_sums_##X(const X *x, float *top, float *total, int64_t rows, int64_t V, float floor,         \
                                   int64_t threads) {                                                                  \
    softmax_sums(x, top, total, rows, V, floor, threads);                                                              \
  }                                                                                                                    \
  extern "C" void gated_##X(const X *gate, const X *up, X *h, int64_t count, int64_t threads) {                        \
    gated(gate, up, h, count, threads);                                                                                \
  }                                                                                                                    \
  extern "C" void gated_back_##X(const X *dh, const X *gate, const X *up, X *h, X *dgate, X *dup, int64_t count,       \
                                 int64_t threads) {                                                                    \
    gated_back(dh, gate, up, h, dgate, dup, count, threads);                                                           \
  }                                                                                                                    \
  extern "C" void attend_##X(X *const *scores, const int64_t *columns, const int32_t *ranges, float *lse,              \
                             const Rows *shape, float scale, int64_t threads) {                                        \
    attend(scores, columns, ranges, lse, shape, scale, threads);                                                       \
  }                                                                                                                    \
  extern "C" void attend_back_##X(X *const *scores, X *const *dp, const int64_t *columns, const int32_t *ranges,       \
                                  const float *lse, const Rows *shape, float scale, int64_t threads) {                 \
    attend_back(scores, dp, columns, ranges, lse, shape, scale, threads);                                              \
  }
#define OF_TWO(X, Y)                                                                                                   \
  extern "C" void softmax_write_##X##_##Y(const X *x, const float *top, const float *factor, Y *out, int64_t rows,     \
                                          int64_t V, float floor, int64_t threads) {                                   \
    softmax_write(x, top, factor, out, rows, V, floor, threads);                                                       \
  }                                                                                                                    \
  extern "C" void norm_rows_##X##_##Y(const X *x, const float *w, const float *cos, const float *sin, Y *y,            \
                                      float *scale, int64_t rows, int64_t D, int64_t heads, float eps,                 \
                                      int64_t threads) {                                                               \
    norm_rows(x, w, cos, sin, y, scale, rows, D, heads, eps, threads);                                                 \
  }                                                                                                                    \
  extern "C" void norm_rows_back_##X##_##Y(const Y *g, const X *x, const float *w, const float *cos, const float *sin, \
                                           const float *scale, X *gx, double *gw, int64_t rows, int64_t D,             \
                                           int64_t heads, int64_t threads) {                                           \
    norm_rows_back(g, x, w, cos, sin, scale, gx, gw, rows, D, heads, threads);                                         \
  }
OF_ONE(float)
OF_ONE(bfloat16)
OF_TWO(float, float)
OF_TWO(float, bfloat16)
OF_TWO(bfloat16, float)
OF_TWO(bfloat16, bfloat16)
