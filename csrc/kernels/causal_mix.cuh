// causal_mix: out[n, k, c] = sum over j <= k of mixer[k, j, c] * x[n, j, c].
//
// Per channel a lower-triangular product, B(B+1)/2 multiply-adds: there is nothing for tensor cores
// here. A CTA owns 32 channels of one block. It takes their x into shared memory once; then each
// warp sums one slot at a time, a lane per channel, so that the mixer, the larger part, is read
// once, 128 contiguous bytes at a time, by loads that do not wait for each other. Sums run j
// ascending in one chain that starts from the first product, the order of fuse_mix too.
//
// Floor, Qwen3-8B head, N=1: 139 KB of mixer and 2 * 16 KB of x and out, 0.04 us at 4.3 TB/s, which
// is below the latency of one launch.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "xpress/limits.h"

namespace xpress::kernels {

template <class T>
struct CausalMix {
  static constexpr int kMaxThreads = 512;
  static constexpr int kChannels = 32;  // of a CTA, one per lane

  struct Params {
    int B;
    int64_t r;
    const T* x;      // [N, B, r]
    const T* mixer;  // [B, B, r]
    T* out;          // [N, B, r]
  };

  struct Shared {
    T x[kMaxBlock][kChannels];  // [B, kChannels]
  };
};

// Sum over j <= k of factors[j * factors_stride] * x[j * x_stride], in one chain: factors in the
// mixer, x in shared memory. Eight factors are loaded before the first of them is used.
template <class T>
XPRESS_DEVICE T mix_slot(const T* factors, int64_t factors_stride, const T* x, int x_stride,
                         int k) {
  constexpr int kAhead = 8;
  T sum = 0;
  for (int first = 0; first <= k; first += kAhead) {
    T loaded[kAhead];
    XPRESS_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (first + i <= k) loaded[i] = device::load_global(factors + (first + i) * factors_stride);
    }
    XPRESS_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int j = first + i;
      if (j > k) break;
      const T value = x[j * x_stride];
      sum = j == 0 ? loaded[i] * value : device::fma(loaded[i], value, sum);
    }
  }
  return sum;
}

template <class T>
XPRESS_KERNEL(CausalMix<T>::kMaxThreads)
causal_mix_kernel(typename CausalMix<T>::Params p) {
  using namespace device;
  constexpr int kChannels = CausalMix<T>::kChannels;
  auto& shared = *reinterpret_cast<typename CausalMix<T>::Shared*>(shared_memory());
  const int64_t groups = p.r / kChannels;  // of channels, CTAs of a block
  const int64_t n = cta_index() / groups;
  const int64_t c = cta_index() % groups * kChannels + lane_index();

  for (int j = warp_index(); j < p.B; j += warp_count()) {
    shared.x[j][lane_index()] = load_global(p.x + (n * p.B + j) * p.r + c);
  }
  cta_sync();
  for (int k = warp_index(); k < p.B; k += warp_count()) {
    const T sum =
        mix_slot(p.mixer + k * p.B * p.r + c, p.r, &shared.x[0][lane_index()], kChannels, k);
    store_global(p.out + (n * p.B + k) * p.r + c, sum);
  }
}

}  // namespace xpress::kernels
