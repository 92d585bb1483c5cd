// fuse_mix: out[n, k, c] = context[n, k, c] + sum over j <= k of mixer[k, j, c] * E[prev[n, j], c],
// E the token table.
//
// A gather of B rows and the triangular sum of causal_mix, in the same form: a CTA owns 32 channels
// of one block, so that r / 32 CTAs serve it; it widens its channels of the B rows into shared
// memory, each read once, then a warp sums a slot at a time. The sum is finished before the context
// is added, so that it is the same whatever the context.
//
// Floor, Qwen3-8B head, N=1: 139 KB of mixer, 8 KB of rows, 2 * 16 KB of context and out: below the
// latency of one launch.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "device/warp.h"
#include "kernels/causal_mix.cuh"
#include "xpress/limits.h"
#include "xpress/params.h"

namespace xpress::kernels {

template <class T>
struct FuseMix {
  static constexpr int kMaxThreads = 512;
  static constexpr int kChannels = 32;  // of a CTA

  struct Params {
    int B;
    int64_t r, V_t;
    const float* context;  // [N, B, r]
    Ids prev;              // [N, B]
    const T* token_table;  // [V_t, r]
    const float* mixer;    // [B, B, r]
    float* out;            // [N, B, r]
  };

  struct Shared {
    float tokens[kMaxBlock][kChannels];  // [B, kChannels]
    int64_t prev[kMaxBlock];             // [B]
    bool ids_are_valid;
  };
};

// `channels` channels, from the one that `token_table` points at, of the rows prev[0 ... B-1],
// widened into tokens [B, channels] in shared memory. All threads of the CTA call this; the caller
// puts a barrier before and after. `channels` is a multiple of 32, the ids are in range.
template <class T>
XPRESS_DEVICE void gather_tokens(const T* token_table, int64_t r, const int64_t* prev, int B,
                                 int channels, float* tokens) {
  const int warps_per_row = channels / device::kWarpSize;
  for (int i = device::warp_index(); i < B * warps_per_row; i += device::warp_count()) {
    const int j = i / warps_per_row;
    const int c = i % warps_per_row * device::kWarpSize + device::lane_index();
    tokens[j * channels + c] = device::to_float(device::load_global(token_table + prev[j] * r + c));
  }
}

// c of slots first ... B-1 and of `channels` channels from the one that `mixer` and `context` point
// at, from tokens [B, channels] in shared memory; emit(slot, channel, value) is called once for
// each by some thread of the CTA. A warp takes 32 channels of a slot at a time.
template <class Emit>
XPRESS_DEVICE void fuse_mix_slots(const float* context, const float* mixer, int64_t r,
                                  const float* tokens, int B, int channels, int first,
                                  const Emit& emit) {
  const int warps_per_row = channels / device::kWarpSize;
  for (int i = first * warps_per_row + device::warp_index(); i < B * warps_per_row;
       i += device::warp_count()) {
    const int k = i / warps_per_row;
    const int c = i % warps_per_row * device::kWarpSize + device::lane_index();
    const float slot_context = device::load_global(context + k * r + c);
    const float sum = mix_slot(mixer + int64_t{k} * B * r + c, r, tokens + c, channels, k);
    emit(k, c, slot_context + sum);
  }
}

template <class T>
XPRESS_KERNEL(FuseMix<T>::kMaxThreads)
fuse_mix_kernel(typename FuseMix<T>::Params p) {
  using namespace device;
  constexpr int kChannels = FuseMix<T>::kChannels;
  auto& shared = *reinterpret_cast<typename FuseMix<T>::Shared*>(shared_memory());
  const int64_t groups = p.r / kChannels;  // of channels, CTAs of a block
  const int64_t n = cta_index() / groups;
  const int64_t c0 = cta_index() % groups * kChannels;

  if (warp_index() == 0) {
    const int j = lane_index();
    bool valid = true;
    if (j < p.B) {
      const int64_t id = load_global(p.prev.data + n * p.prev.stride0 + j * p.prev.stride1);
      valid = id >= 0 && id < p.V_t;
      shared.prev[j] = id;
    }
    const bool all_valid = ballot(valid) == kAllLanes;
    if (j == 0) shared.ids_are_valid = all_valid;
  }
  cta_sync();
  float* out = p.out + n * p.B * p.r + c0;
  if (!shared.ids_are_valid) {
    for (int k = warp_index(); k < p.B; k += warp_count()) {
      store_global(out + k * p.r + lane_index(), bits_to_float(0x7fc00000u));
    }
    return;
  }
  float* tokens = &shared.tokens[0][0];
  gather_tokens(p.token_table + c0, p.r, shared.prev, p.B, kChannels, tokens);
  cta_sync();
  fuse_mix_slots(p.context + n * p.B * p.r + c0, p.mixer + c0, p.r, tokens, p.B, kChannels,
                 /*first=*/0,
                 [&](int k, int c, float value) { store_global(out + k * p.r + c, value); });
}

}  // namespace xpress::kernels
