// causal_mix: out[n, k, c] = sum over j <= k of mixer[k, j, c] * x[n, j, c].
//
// Per channel a lower-triangular product, B(B+1)/2 multiply-adds: there is nothing for tensor cores
// here. One thread owns one channel of one block, so that neighbouring threads read neighbouring
// addresses, and sums j ascending in one chain, the order of fuse_mix too.
//
// Floor, Qwen3-8B head, N=1: 139 KB of mixer and 2 * 16 KB of x and out, which is below the
// latency of one launch.
#pragma once

#include "device/memory.h"

namespace xpress::kernels {

template <class T>
struct CausalMix {
  static constexpr int kThreads = 128;

  struct Params {
    int64_t N, B, r;
    const T* x;      // [N, B, r]
    const T* mixer;  // [B, B, r]
    T* out;          // [N, B, r]
  };
};

template <class T>
XPRESS_KERNEL(CausalMix<T>::kThreads)
causal_mix_kernel(typename CausalMix<T>::Params p) {
  using namespace device;
  const int64_t channel = cta_index() * thread_count() + thread_index();
  const int64_t n = channel / p.r, c = channel % p.r;
  if (n >= p.N) return;
  const T* x = p.x + n * p.B * p.r + c;
  T* out = p.out + n * p.B * p.r + c;
  for (int64_t k = 0; k < p.B; ++k) {
    T sum = 0;
    for (int64_t j = 0; j <= k; ++j) {
      const T factor = load_global(p.mixer + (k * p.B + j) * p.r + c);
      sum = fma(factor, load_global(x + j * p.r), sum);
    }
    store_global(out + k * p.r, sum);
  }
}

}  // namespace xpress::kernels
