// Passes over rows of float32 for which PyTorch needs several operations each, forwards and backwards. Each names the
// formula that it computes; tests hold it against the same in PyTorch and in float64.
//
// Rows are shared out among `threads`; sums over rows are added up in the order of the threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

// -- softmax over a vocabulary ---------------------------------------------------------------------------------------

// top[r] = max_v x[r, v]; total[r] = sum_v exp(max(x[r, v] - top[r], floor)).
extern "C" void softmax_sums(const float *x, float *top, float *total, int64_t rows, int64_t V, float floor,
                             int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * V;
    float most = row[0], sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t v = 0; v < V; v++) most = row[v] > most ? row[v] : most;
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
extern "C" void softmax_write(const float *x, const float *top, const float *factor, float *out, int64_t rows,
                              int64_t V, float floor, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const float most = top[r], scale = factor[r];
    const float *row = x + r * V;
    float *to = out + r * V;
#pragma omp simd
    for (int64_t v = 0; v < V; v++) to[v] = scale * power(at_least(row[v] - most, floor));
  }
}

// -- norm, and norm with rotation ------------------------------------------------------------------------------------

// n = w x s with s = 1 / sqrt(mean(x^2) + eps). Without cos, y = n. With cos and sin [rows / heads, D], features i and
// i + D/2 of n are turned: y_i = n_i cos_i - n_j sin_i and y_j = n_j cos_j + n_i sin_j, j = i + D/2.
extern "C" void norm_rows(const float *x, const float *w, const float *cos, const float *sin, float *y, float *scale,
                          int64_t rows, int64_t D, int64_t heads, float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * D;
    float *to = y + r * D;
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < D; i++) squares += row[i] * row[i];
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
extern "C" void norm_rows_back(const float *g, const float *x, const float *w, const float *cos, const float *sin,
                               const float *scale, float *gx, double *gw, int64_t rows, int64_t D, int64_t heads,
                               int64_t threads) {
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
        const float *row = x + r * D, *in = g + r * D;
        const float s = scale[r];
        if (cos == nullptr) {
          std::memcpy(turned, in, D * sizeof(float));
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
        float *to = gx + r * D;
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
extern "C" void gated(const float *gate, const float *up, float *h, int64_t count, int64_t threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
  for (int64_t i = 0; i < count; i++) h[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

// h once more, and its gradients: d gate = dh up (s + gate s (1 - s)), d up = dh gate s, with s = sigmoid(gate). They may
// be written over dh and h: `dgate` may be `dh`.
extern "C" void gated_back(const float *dh, const float *gate, const float *up, float *h, float *dgate, float *dup,
                           int64_t count, int64_t threads) {
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

// Scores become probabilities, 0 where a row does not see; lse[row] = log sum exp of what it sees.
extern "C" void attend(float *const *scores, const int64_t *columns, const int32_t *ranges, float *lse,
                       const Rows *shape, int64_t threads) {
  const Rows s = *shape;
  const int64_t rows = s.count();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const int32_t *range = seen(ranges, s, r);
    float most = -INFINITY, total = 0.0f;
    for (int64_t p = 0; p < s.parts; p++) {
      const float *row = scores[p] + r * columns[p];
      const int32_t end = range[2 * p + 1];
#pragma omp simd reduction(max : most)
      for (int32_t c = range[2 * p]; c < end; c++) most = row[c] > most ? row[c] : most;
    }
    for (int64_t p = 0; p < s.parts; p++) {
      float *row = scores[p] + r * columns[p];
      const int32_t end = range[2 * p + 1];
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int32_t c = range[2 * p]; c < end; c++) {
        const float e = power(at_least(row[c] - most, -60.0f));
        row[c] = e;
        sum += e;
      }
      total += sum;
    }
    const float scale = 1.0f / total;
    for (int64_t p = 0; p < s.parts; p++) {
      float *row = scores[p] + r * columns[p];
      const int32_t first = range[2 * p], end = range[2 * p + 1];
      for (int64_t c = 0; c < first; c++) row[c] = 0.0f;
#pragma omp simd
      for (int32_t c = first; c < end; c++) row[c] *= scale;
      for (int64_t c = end; c < columns[p]; c++) row[c] = 0.0f;
    }
    lse[r] = most + std::log(total);
  }
}

// Scores become probabilities p once more, and dp, the gradients of those, becomes that of the scores:
// p (dp - sum over all columns of p dp).
extern "C" void attend_back(float *const *scores, float *const *dp, const int64_t *columns, const int32_t *ranges,
                            const float *lse, const Rows *shape, int64_t threads) {
  const Rows s = *shape;
  const int64_t rows = s.count();
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const int32_t *range = seen(ranges, s, r);
    const float sum = lse[r];
    float dot = 0.0f;
    for (int64_t p = 0; p < s.parts; p++) {
      float *row = scores[p] + r * columns[p];
      const float *slope = dp[p] + r * columns[p];
      const int32_t first = range[2 * p], end = range[2 * p + 1];
      for (int64_t c = 0; c < first; c++) row[c] = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int32_t c = first; c < end; c++) {
        const float e = power(at_least(row[c] - sum, -60.0f));
        row[c] = e;
        dot += e * slope[c];
      }
      for (int64_t c = end; c < columns[p]; c++) row[c] = 0.0f;
    }
    for (int64_t p = 0; p < s.parts; p++) {
      const float *row = scores[p] + r * columns[p];
      float *slope = dp[p] + r * columns[p];
#pragma omp simd
      for (int64_t c = 0; c < columns[p]; c++) slope[c] = row[c] * (slope[c] - dot);
    }
  }
}
