// causal_mix: y_k = sum_{j<=k} M[k,j] * x_j, per channel; and its backward for x and M.
//
// Elementwise over channels: no sum crosses lanes, so plain loops over fused multiply-adds give the
// same bits in every instruction set. Entries of M above the diagonal are never read.
#include "operators.h"
#include "parallel.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

XPRESS_INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
XPRESS_INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

template <class T>
void scale(T* y, const T* m, const T* x, int64_t r) {
  for (int64_t c = 0; c < r; ++c) y[c] = m[c] * x[c];
}

template <class T>
void accumulate(T* y, const T* m, const T* x, int64_t r) {
  for (int64_t c = 0; c < r; ++c) y[c] = fused(m[c], x[c], y[c]);
}

template <class T>
void mix(const CausalMixParams& p) {
  const T* mixer = static_cast<const T*>(p.mixer);
  parallel_items(p.N, [&](int64_t n) {
    const T* x = static_cast<const T*>(p.x) + n * p.B * p.r;
    T* y = static_cast<T*>(p.out) + n * p.B * p.r;
    for (int64_t k = 0; k < p.B; ++k) {
      const T* m = mixer + k * p.B * p.r;
      scale(y + k * p.r, m, x, p.r);
      for (int64_t j = 1; j <= k; ++j) accumulate(y + k * p.r, m + j * p.r, x + j * p.r, p.r);
    }
  });
}

// grad_x_j = sum_{k>=j} M[k,j] * grad_k;  grad_M[k,j] = sum_n grad_k * x_j for j <= k.
template <class T>
void mix_backward(const CausalMixBackwardParams& p) {
  const T* mixer = static_cast<const T*>(p.mixer);
  const T* grad_out = static_cast<const T*>(p.grad_out);
  const T* x = static_cast<const T*>(p.x);
  T* grad_x = static_cast<T*>(p.grad_x);
  T* grad_mixer = static_cast<T*>(p.grad_mixer);
  const int64_t B = p.B, r = p.r;
  parallel_items(p.N, [&](int64_t n) {
    const T* g = grad_out + n * B * r;
    T* gx = grad_x + n * B * r;
    for (int64_t j = 0; j < B; ++j) {
      scale(gx + j * r, mixer + (j * B + j) * r, g + j * r, r);
      for (int64_t k = j + 1; k < B; ++k) {
        accumulate(gx + j * r, mixer + (k * B + j) * r, g + k * r, r);
      }
    }
  });
  parallel_items(B * B, [&](int64_t item) {
    const int64_t k = item / B, j = item % B;
    T* gm = grad_mixer + item * r;
    for (int64_t c = 0; c < r; ++c) gm[c] = T(0);
    for (int64_t n = 0; j <= k && n < p.N; ++n) {
      accumulate(gm, grad_out + (n * B + k) * r, x + (n * B + j) * r, r);
    }
  });
}

}  // namespace

void causal_mix(const CausalMixParams& p) { p.is_double ? mix<double>(p) : mix<float>(p); }

void causal_mix_backward(const CausalMixBackwardParams& p) {
  p.is_double ? mix_backward<double>(p) : mix_backward<float>(p);
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
