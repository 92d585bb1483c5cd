// The latent stage of a Jacobi pass, fuse_mix and refiner_mlp, for one block by one cluster of
// CTAs; and the kernel that does it for a pass over the full vocabulary.
//
// Why a cluster. The stage is all latency: 16 slots, 13 MFLOP, but 786 KB of MLP weights for
// Qwen3-8B's head, which one SM would read from L2 at some 100 GB/s in 7 us. Eight SMs read an
// eighth each. What every CTA needs from the others, c and the hidden layer, is written straight
// into their shared memory, with a cluster barrier before it is read: two a pass. Where there are
// no clusters a single CTA does it all, in the same code.
//
// Who computes what: channels go to CTAs in units of 32, in order; a CTA sums its channels of c and
// later the same columns of z. Columns of the hidden layer go in tiles of 8. A sum over k is never
// split, so the bits are those of the operators fuse_mix and refiner_mlp, and depend neither on the
// cluster nor on N. An MLP whose hidden layer does not fit is walked in chunks, the accumulators of
// z staying in registers.
//
// Weights are read through L1, which keeps a CTA's share (98 KB of MLP, 17 KB of mixer) from pass
// to pass in the kernel that runs many (jacobi_candidates.cuh).
#pragma once

#include "kernels/fuse_mix.cuh"
#include "kernels/jacobi_state.cuh"
#include "kernels/refiner_mlp.cuh"

namespace xpress::kernels {

template <class T>
struct JacobiLatent {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kChannels = 32;  // of a unit
  // Products of 16 rows by 8 columns of z that a warp may own: 512 channels, one CTA.
  static constexpr int kDownTiles = 512 / kProductColumns / kWarps;

  // The inputs of the stage.
  struct Stage {
    int B, r, m;
    int chunk;             // columns of the hidden layer in shared memory at a time
    const float* context;  // [N, B, r]
    const T* token_table;  // [V_t, r]
    const float* mixer;    // [B, B, r]
    const T* mlp_gate_up;  // [2m, r]
    const T* mlp_down;     // [r, m]
    float* c;              // [N, B, r], scratch
    T* z;                  // [N, B, r]
  };

  struct Params {
    JacobiState state;
    Stage stage;
    bool commits;  // the keys of the pass before
  };

  // Followed by c [16 or 32, padded_stride(r)] and hidden [16, padded_stride(chunk)].
  struct Shared {
    float tokens[kMaxBlock][kChannels];
    int64_t ids[kMaxBlock + 2];
    int settled, passes;
  };

  static constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;

  XPRESS_DEVICE static Shared& shared() {
    return *reinterpret_cast<Shared*>(device::shared_memory());
  }
  // Rounded c; in the candidate loop z too, when c is no longer needed.
  XPRESS_DEVICE static T* rounded(const Stage&) {
    return reinterpret_cast<T*>(device::shared_memory() + kSharedBytes);
  }
  XPRESS_DEVICE static T* hidden(const Stage& s) {
    return rounded(s) + (s.B > 16 ? 32 : 16) * padded_stride<T>(s.r);
  }
};

// Writes `value` to the same place in the shared memory of every CTA of the cluster.
template <class T>
XPRESS_DEVICE void store_to_cluster(T* shared, T value) {
  for (int rank = 0; rank < device::cluster_size(); ++rank) {
    *device::cluster_map(shared, rank) = value;
  }
}

// This CTA's part of `count` things: [begin, end).
struct Share {
  int begin, end;

  XPRESS_DEVICE explicit Share(int count) {
    const int size = (count + device::cluster_size() - 1) / device::cluster_size();
    begin = device::cluster_rank() * size;
    end = begin + size < count ? begin + size : count;
  }
};

// z of slots first ... B-1 of block n from the ids in shared memory: to every CTA's `rounded`, or,
// if `to_global`, to stage.z. All threads of the cluster call this, after a cluster barrier; a
// caller that reads z in shared memory puts one behind it.
template <class T>
XPRESS_DEVICE void latent_stage(const typename JacobiLatent<T>::Stage& s, int64_t n, int first,
                                bool to_global) {
  using namespace device;
  using Kernel = JacobiLatent<T>;
  constexpr int kChannels = Kernel::kChannels;
  auto& shared = Kernel::shared();
  T* rounded = Kernel::rounded(s);
  T* hidden = Kernel::hidden(s);
  const int stride = padded_stride<T>(s.r), hidden_stride = padded_stride<T>(s.chunk);
  const int64_t block = n * s.B * s.r;

  const Share units(s.r / kChannels);
  for (int unit = units.begin; unit < units.end; ++unit) {
    const int c0 = unit * kChannels;
    cta_sync();  // the tokens' channels of the unit before are no longer read
    gather_tokens(s.token_table + c0, s.r, shared.ids, s.B, kChannels, &shared.tokens[0][0]);
    cta_sync();
    fuse_mix_slots(s.context + block + c0, s.mixer + c0, s.r, &shared.tokens[0][0], s.B, kChannels,
                   first, [&](int slot, int channel, float value) {
                     store_global(s.c + block + slot * s.r + c0 + channel, value);
                     store_to_cluster(rounded + slot * stride + c0 + channel, round_to<T>(value));
                   });
  }
  cluster_sync();  // c is complete

  const int column0 = units.begin * kChannels;
  const int down_tiles = (units.end - units.begin) * (kChannels / kProductColumns);
  for (int row0 = first / kProductRows * kProductRows; row0 < s.B; row0 += kProductRows) {
    const SharedRows<T> c_rows{rounded + row0 * stride, stride};
    float acc[Kernel::kDownTiles][4] = {};
    for (int m0 = 0; m0 < s.m; m0 += s.chunk) {
      const int width = s.m - m0 < s.chunk ? s.m - m0 : s.chunk;
      const Share columns(width / kProductColumns);
      for (int tile = columns.begin + warp_index(); tile < columns.end; tile += warp_count()) {
        const T* gate = s.mlp_gate_up + int64_t{m0 + tile * kProductColumns} * s.r;
        mlp_hidden_tile<T>(c_rows, GuardedRows<T>{gate, s.r, kProductColumns},
                           GuardedRows<T>{gate + int64_t{s.m} * s.r, s.r, kProductColumns}, s.r,
                           [&](int row, int column, T value) {
                             store_to_cluster(
                                 hidden + row * hidden_stride + tile * kProductColumns + column,
                                 value);
                           });
      }
      cluster_sync();  // this chunk of the hidden layer is complete
      XPRESS_UNROLL
      for (int i = 0; i < Kernel::kDownTiles; ++i) {
        const int tile = warp_index() + i * warp_count();
        if (tile >= down_tiles) continue;
        const T* down = s.mlp_down + int64_t{column0 + tile * kProductColumns} * s.m + m0;
        product<T>(acc[i], SharedRows<T>{hidden, hidden_stride},
                   GuardedRows<T>{down, s.m, kProductColumns}, width);
      }
      // Before the next chunk or rows are written over it.
      if (m0 + s.chunk < s.m || row0 + kProductRows < s.B) cluster_sync();
    }
    XPRESS_UNROLL
    for (int i = 0; i < Kernel::kDownTiles; ++i) {
      const int tile = warp_index() + i * warp_count();
      if (tile >= down_tiles) continue;
      for_each_element(acc[i], [&](int row, int column, float value) {
        const int slot = row0 + row, channel = column0 + tile * kProductColumns + column;
        if (slot < first || slot >= s.B) return;
        const int64_t at = block + slot * s.r + channel;
        const T z = round_to<T>(load_global(s.c + at) + value);
        if (to_global) {
          store_global(s.z + at, z);
        } else {
          store_to_cluster(rounded + slot * stride + channel, z);
        }
      });
    }
  }
}

// Brings the state of block n into every CTA's shared memory.
template <class T>
XPRESS_DEVICE void load_state(const JacobiState& s, int64_t n) {
  auto& shared = JacobiLatent<T>::shared();
  for (int i = device::thread_index(); i <= s.B; i += device::thread_count()) {
    shared.ids[i] = device::load_global(s.ids + n * (s.B + 1) + i);
  }
  if (device::thread_index() == 0) {
    shared.settled = device::load_global(s.settled + n);
    shared.passes = device::load_global(s.passes + n);
  }
  device::cta_sync();
}

// Takes the keys of a pass into the state in shared memory. The same in every CTA of the cluster.
template <class T>
XPRESS_DEVICE void commit_to_shared(const JacobiState& s, const uint64_t* keys,
                                    bool keys_are_shared) {
  using namespace device;
  auto& shared = JacobiLatent<T>::shared();
  if (warp_index() == 0 && shared.settled < s.B - 1) {
    const int lane = lane_index(), settled = shared.settled;
    uint64_t key = 0;
    if (lane < s.B - 1) key = keys_are_shared ? keys[lane] : load_global(keys + lane);
    const Commit commit = commit_pass(s, key, settled, shared.ids);
    warp_sync();  // every lane has read what the first one writes over
    if (lane == 0) {
      shared.settled = commit.valid ? commit.settled : s.B - 1;
      shared.passes = commit.valid ? shared.passes + 1 : -1;
    }
  }
  cta_sync();
}

// Writes the state back, by one CTA of the cluster.
template <class T>
XPRESS_DEVICE void store_state(const JacobiState& s, int64_t n, int settled) {
  auto& shared = JacobiLatent<T>::shared();
  if (device::cluster_rank() != 0) return;
  for (int i = device::thread_index(); i <= s.B; i += device::thread_count()) {
    device::store_global(s.ids + n * (s.B + 1) + i, shared.ids[i]);
  }
  if (device::thread_index() == 0) {
    device::store_global(s.settled + n, settled);
    device::store_global(s.passes + n, shared.passes);
  }
}

template <class T>
XPRESS_LARGE_KERNEL(JacobiLatent<T>::kThreads)
jacobi_latent_kernel(typename JacobiLatent<T>::Params p) {
  using namespace device;
  using Kernel = JacobiLatent<T>;
  const int64_t n = cta_index() / cluster_size();
  const int D = p.state.B - 1;
  uint64_t* keys = p.state.keys + n * D;
  load_state<T>(p.state, n);
  if (p.commits) commit_to_shared<T>(p.state, keys, /*keys_are_shared=*/false);
  cluster_sync();  // every CTA runs, and has read what the first one now writes over
  if (p.commits) {
    store_state<T>(p.state, n, Kernel::shared().settled);
    if (cluster_rank() == 0 && thread_index() < D) store_global(keys + thread_index(), uint64_t{0});
  }
  const int settled = Kernel::shared().settled;
  if (settled == D) return;
  latent_stage<T>(p.stage, n, settled + 1, /*to_global=*/true);
}

}  // namespace xpress::kernels
