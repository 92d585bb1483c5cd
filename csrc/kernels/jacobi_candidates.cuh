// jacobi_refine on candidates: all passes of a block, to its fixed point or the cap, in one kernel.
//
// A cluster serves a block (jacobi_latent.cuh). After the latent stage the drafted slots go round
// the CTAs, each scores the candidates of its slots, eight at a time and warp, and writes the best
// key of a slot into every CTA's shared memory; then every CTA commits the pass in the same way.
// Four cluster barriers a pass, no trip to global memory but for weights, which after the first
// pass lie in L1: 15 * 32 rows of W_r for C = 32 are 31 KB a CTA.
//
// Floor, Qwen3-8B head, N=1: barriers and latency, perhaps 2 to 4 us a pass.
#pragma once

#include "kernels/jacobi_latent.cuh"
#include "kernels/readout_candidates.cuh"

namespace xpress::kernels {

template <class T>
struct JacobiCandidates {
  static constexpr int kThreads = JacobiLatent<T>::kThreads;
  static constexpr int kWarps = JacobiLatent<T>::kWarps;

  struct Params {
    JacobiState state;
    typename JacobiLatent<T>::Stage stage;
    const T* readout;  // [V, r]
    int num_passes;    // the cap, in this call
    // Exact mode: the full readout goes on from z, and `settled` keeps what is proven.
    bool keeps_z;
  };

  // Behind what the latent stage uses.
  struct Shared {
    uint64_t best[kWarps][kMaxBlock];
    uint64_t keys[kMaxBlock];
  };

  XPRESS_DEVICE static Shared& shared(const typename JacobiLatent<T>::Stage& s) {
    return *reinterpret_cast<Shared*>(JacobiLatent<T>::hidden(s) +
                                      kProductRows * padded_stride<T>(s.chunk));
  }
};

// The best key among the candidates of each unsettled slot, to every CTA's keys[slot - 1].
template <class T>
XPRESS_DEVICE void score_candidates(const typename JacobiCandidates<T>::Params& p, int64_t n,
                                    int settled) {
  using namespace device;
  const JacobiState& s = p.state;
  const int D = s.B - 1, r = p.stage.r, t = lane_index() % 4;
  auto& shared = JacobiCandidates<T>::shared(p.stage);
  const T* z = JacobiLatent<T>::rounded(p.stage);
  const int stride = padded_stride<T>(r);
  const int groups = (s.capacity + kProductColumns - 1) / kProductColumns;
  for (int d = lane_index(); d < D; d += kWarpSize) shared.best[warp_index()][d] = 0;
  warp_sync();
  // Items are (slot of this CTA, eight candidates), dealt out to the warps.
  for (int item = warp_index();; item += warp_count()) {
    const int d = item / groups * cluster_size() + cluster_rank();
    if (d >= D) break;
    const int64_t row = n * D + d;
    const int i0 = item % groups * kProductColumns;
    const int left = load_global(s.candidate_count + row) - i0;
    const int count = left < kProductColumns ? left : kProductColumns;
    if (d < settled || count <= 0) continue;
    const int64_t* ids = s.candidate_ids + row * s.capacity + i0;
    const float* logits = s.candidate_logits + row * s.capacity + i0;
    // Every lane's three columns, g and 2t, 2t + 1; past the last candidate the first stands in.
    const auto id_of = [&](int column) { return load_global(ids + (column < count ? column : 0)); };
    const int64_t id_g = id_of(lane_index() / 4), id_0 = id_of(2 * t), id_1 = id_of(2 * t + 1);
    const uint64_t key = warp_max(candidate_key<T>(
        [&](int k) { return *reinterpret_cast<const Bytes16*>(z + (d + 1) * stride + k); },
        [&](int column, int k) {
          const int64_t v = column == 2 * t ? id_0 : column == 2 * t + 1 ? id_1 : id_g;
          return load_global_or_zero(p.readout + v * r + k, true);
        },
        r, count, [&](int column) { return column == 2 * t ? id_0 : id_1; },
        [&](int column) { return load_global(logits + column); }));
    if (lane_index() == 0) {
      uint64_t* best = &shared.best[warp_index()][d];
      *best = max(*best, key);
    }
  }
  cta_sync();
  const int d = thread_index();
  if (d < D && d % cluster_size() == cluster_rank()) {
    uint64_t best = 0;
    for (int w = 0; w < warp_count(); ++w) best = max(best, shared.best[w][d]);
    store_to_cluster(&shared.keys[d], best);
  }
}

template <class T>
XPRESS_LARGE_KERNEL(JacobiCandidates<T>::kThreads)
jacobi_candidates_kernel(typename JacobiCandidates<T>::Params p) {
  using namespace device;
  using Latent = JacobiLatent<T>;
  const int64_t n = cta_index() / cluster_size();
  const int D = p.state.B - 1;
  load_state<T>(p.state, n);
  const int settled_before = Latent::shared().settled;
  cluster_sync();  // every CTA runs, and has read what the first one writes over at the end
  if (settled_before == D) return;
  for (int pass = 0; pass < p.num_passes && Latent::shared().settled < D; ++pass) {
    const int settled = Latent::shared().settled;
    latent_stage<T>(p.stage, n, settled + 1, /*to_global=*/false);
    cluster_sync();  // z is complete
    score_candidates<T>(p, n, settled);
    cluster_sync();  // so are the keys; and z is no longer read
    commit_to_shared<T>(p.state, JacobiCandidates<T>::shared(p.stage).keys,
                        /*keys_are_shared=*/true);
  }
  const bool failed = Latent::shared().passes < 0;
  const int settled = !p.keeps_z || failed ? D : settled_before;
  store_state<T>(p.state, n, settled);
  if (!p.keeps_z) return;
  const T* z = Latent::rounded(p.stage);
  const int r = p.stage.r, stride = padded_stride<T>(r);
  for (int i = thread_index(); i < D * r; i += thread_count()) {
    const int slot = i / r + 1, channel = i % r;
    if (slot <= settled_before || slot % cluster_size() != cluster_rank()) continue;
    store_global(p.stage.z + (n * p.state.B + slot) * r + channel, z[slot * stride + channel]);
  }
}

}  // namespace xpress::kernels
