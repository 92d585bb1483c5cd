// readout_argmax among candidates: the best of base + W_r z over C ids per slot.
//
// The candidates of a slot are its own, so a product of 16 rows by 8 ids has one row that counts.
// It is done all the same, with z in every row, for the sake of the bits: a logit must be what the
// full readout would make of it. A CTA owns a slot, and its warps take eight candidates at a time;
// rows of W_r are gathered, 16 bytes a lane.
//
// Floor, Qwen3-8B head, N=1, C=32: 15 * 32 rows of 512 bytes, 0.25 MB, less than a launch.
#pragma once

#include "kernels/readout.cuh"

namespace xpress::kernels {

// Eight candidates of one slot: the best key of those with column < count, of the columns that this
// lane owns (warp_max() of it is the best of all). `z` (k) and `rows` (column, k) give 16 bytes at
// element k; rows from `count` on must be readable or zero.
template <class T, class Z, class Rows, class Id, class Base>
XPRESS_DEVICE uint64_t candidate_key(const Z& z, const Rows& rows, int r, int count, const Id& id,
                                     const Base& base) {
  float acc[4] = {};
  product<T>(acc, [&](int, int k) { return z(k); }, rows, r);
  uint64_t best = 0;
  const int column = 2 * (device::lane_index() % 4);
  XPRESS_UNROLL
  for (int i = 0; i < 2; ++i) {
    if (column + i >= count) continue;
    best = device::max(best, argmax_key(base(column + i) + acc[i], id(column + i)));
  }
  return best;
}

template <class T>
struct ReadoutCandidates {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;

  struct Params {
    int64_t D, V, C;
    int r;
    StridedRows z;              // [N, D, r]
    StridedRows base_logits;    // [N, D, V]
    const T* readout;           // [V, r]
    const int64_t* candidates;  // [N, D, C]
    int64_t* index;             // [N, D]
    float* value;               // [N, D]
  };

  struct Shared {
    uint64_t best[kWarps];
    bool valid[kWarps];
    // then z [r], aligned to 16 bytes
  };
};

template <class T>
XPRESS_LARGE_KERNEL(ReadoutCandidates<T>::kThreads)
readout_candidates_kernel(typename ReadoutCandidates<T>::Params p) {
  using namespace device;
  using Kernel = ReadoutCandidates<T>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  T* z = reinterpret_cast<T*>(shared_memory() + (sizeof(typename Kernel::Shared) + 15) / 16 * 16);
  const int64_t row = cta_index();
  const T* latent = row_of<T>(p.z, row, p.D);
  for (int k = thread_index(); k < p.r; k += thread_count()) z[k] = load_global(latent + k);
  cta_sync();

  const int64_t* ids = p.candidates + row * p.C;
  uint64_t best = 0;
  bool valid = true;
  for (int64_t i0 = warp_index() * kProductColumns; i0 < p.C;
       i0 += Kernel::kWarps * kProductColumns) {
    const int count = static_cast<int>(p.C - i0 < kProductColumns ? p.C - i0 : kProductColumns);
    // Lane l holds the id of column l % 8.
    const int column = lane_index() % kProductColumns;
    int64_t own = column < count ? load_global(ids + i0 + column) : 0;
    if (own < 0 || own >= p.V) {
      valid = false;
      own = 0;
    }
    const auto id = [&](int i) { return shuffle(own, i); };
    const int t = lane_index() % 4;
    const int64_t row_g = id(lane_index() / 4), row_0 = id(2 * t), row_1 = id(2 * t + 1);
    const auto rows = [&](int i, int k) {
      // Asked for column g, or for 2t and 2t + 1, which coincide where they name the same column.
      const int64_t v = i == 2 * t ? row_0 : i == 2 * t + 1 ? row_1 : row_g;
      return load_global_or_zero(p.readout + v * p.r + k, i < count);
    };
    const auto base = [&](int i) {
      const int64_t v = i == 2 * t ? row_0 : row_1;
      float logit = 0.0f;
      with_type(p.base_logits.dtype, [&](auto* type) {
        using Base = std::remove_pointer_t<decltype(type)>;
        logit = to_float(load_global(row_of<Base>(p.base_logits, row, p.D) + v));
      });
      return logit;
    };
    best = max(best, candidate_key<T>(
                         [&](int k) { return *reinterpret_cast<const Bytes16*>(z + k); }, rows, p.r,
                         count, [&](int i) { return i == 2 * t ? row_0 : row_1; }, base));
  }
  best = warp_max(best);
  const bool all_valid = ballot(valid) == kAllLanes;
  if (lane_index() == 0) {
    shared.best[warp_index()] = best;
    shared.valid[warp_index()] = all_valid;
  }
  cta_sync();
  if (thread_index() != 0) return;
  for (int w = 1; w < Kernel::kWarps; ++w) {
    best = max(best, shared.best[w]);
    shared.valid[0] = shared.valid[0] && shared.valid[w];
  }
  store_global(p.index + row, shared.valid[0] ? key_id(best) : int64_t{-1});
  store_global(p.value + row, shared.valid[0] ? key_logit(best) : bits_to_float(0x7fc00000u));
}

}  // namespace xpress::kernels
