// causal_mix backward, for x and for the mixer:
//   grad_x[n, j, c]     = sum over k >= j of mixer[k, j, c] * grad_out[n, k, c]
//   grad_mixer[k, j, c] = sum over n of grad_out[n, k, c] * x[n, j, c] for j <= k, else 0
//
// grad_x has the form of causal_mix, with the triangle transposed.
//
// grad_mixer is a sum over the whole batch, which in training is thousands of blocks. A CTA owns a
// tile of 4 by 4 pairs (k, j) and 32 channels, a lane per channel, the 16 sums in registers: 8
// loads for 16 multiply-adds. Each of its eight warps takes every eighth block, and their sums are
// added in the order of the warps, so that equal inputs give equal bits.
//
// Floor, r=256, B=16, N=6400 (a training step): 3 tensors of 105 MB, 73 us at 4.3 TB/s. grad_mixer
// reads grad_out and x from L2 2.5 times each.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "kernels/causal_mix.cuh"
#include "xpress/limits.h"

namespace xpress::kernels {

template <class T>
struct CausalMixBackward {
  static constexpr int kMaxThreads = 512;
  static constexpr int kChannels = 32;  // of a CTA, one per lane
  static constexpr int kWarps = 8;      // of a CTA of grad_mixer
  static constexpr int kTile = 4;       // slots k and slots j of a CTA of grad_mixer

  struct Params {
    int B;
    int64_t N, r;
    const T* grad_out;  // [N, B, r]
    const T* x;         // [N, B, r]
    const T* mixer;     // [B, B, r]
    T* grad_x;          // [N, B, r]
    T* grad_mixer;      // [B, B, r]
  };

  struct SharedForX {
    T grad_out[kMaxBlock][kChannels];  // [B, kChannels]
  };

  struct SharedForMixer {
    T sums[kWarps][kTile][kTile][kChannels];
  };
};

template <class T>
XPRESS_KERNEL(CausalMixBackward<T>::kMaxThreads)
causal_mix_grad_x_kernel(typename CausalMixBackward<T>::Params p) {
  using namespace device;
  using Kernel = CausalMixBackward<T>;
  auto& shared = *reinterpret_cast<typename Kernel::SharedForX*>(shared_memory());
  const int64_t groups = p.r / Kernel::kChannels;  // of channels, CTAs of a block
  const int64_t n = cta_index() / groups;
  const int64_t c = cta_index() % groups * Kernel::kChannels + lane_index();

  for (int k = warp_index(); k < p.B; k += warp_count()) {
    shared.grad_out[k][lane_index()] = load_global(p.grad_out + (n * p.B + k) * p.r + c);
  }
  cta_sync();
  for (int j = warp_index(); j < p.B; j += warp_count()) {
    const T* factors = p.mixer + (int64_t{j} * p.B + j) * p.r + c;  // mixer[k, j, c] from k = j on
    const T sum = mix_slot(factors, p.B * p.r, &shared.grad_out[j][lane_index()], Kernel::kChannels,
                           p.B - 1 - j);
    store_global(p.grad_x + (n * p.B + j) * p.r + c, sum);
  }
}

template <class T>
XPRESS_KERNEL(32 * CausalMixBackward<T>::kWarps)
causal_mix_grad_mixer_kernel(typename CausalMixBackward<T>::Params p) {
  using namespace device;
  using Kernel = CausalMixBackward<T>;
  constexpr int kTile = Kernel::kTile, kChannels = Kernel::kChannels;
  auto& shared = *reinterpret_cast<typename Kernel::SharedForMixer*>(shared_memory());
  const int64_t groups = p.r / kChannels;
  const int tiles = (p.B + kTile - 1) / kTile;
  const int64_t tile = cta_index() / groups;
  const int k0 = static_cast<int>(tile / tiles) * kTile;
  const int j0 = static_cast<int>(tile % tiles) * kTile;
  const int64_t c = cta_index() % groups * kChannels + lane_index();

  T sums[kTile][kTile] = {};
  if (j0 <= k0) {  // a tile above the diagonal is all zero
    for (int64_t n = warp_index(); n < p.N; n += Kernel::kWarps) {
      T grads[kTile], xs[kTile];
      XPRESS_UNROLL
      for (int i = 0; i < kTile; ++i) {
        grads[i] = k0 + i < p.B ? load_global(p.grad_out + (n * p.B + k0 + i) * p.r + c) : T(0);
        xs[i] = j0 + i < p.B ? load_global(p.x + (n * p.B + j0 + i) * p.r + c) : T(0);
      }
      XPRESS_UNROLL
      for (int k = 0; k < kTile; ++k) {
        XPRESS_UNROLL
        for (int j = 0; j < kTile; ++j) sums[k][j] = fma(grads[k], xs[j], sums[k][j]);
      }
    }
  }
  XPRESS_UNROLL
  for (int k = 0; k < kTile; ++k) {
    XPRESS_UNROLL
    for (int j = 0; j < kTile; ++j) shared.sums[warp_index()][k][j][lane_index()] = sums[k][j];
  }
  cta_sync();
  for (int pair = warp_index(); pair < kTile * kTile; pair += Kernel::kWarps) {
    const int k = pair / kTile, j = pair % kTile;
    if (k0 + k >= p.B || j0 + j >= p.B) continue;
    T sum = 0;
    if (j0 + j <= k0 + k) {
      for (int w = 0; w < Kernel::kWarps; ++w) sum += shared.sums[w][k][j][lane_index()];
    }
    store_global(p.grad_mixer + (int64_t{k0 + k} * p.B + j0 + j) * p.r + c, sum);
  }
}

}  // namespace xpress::kernels
