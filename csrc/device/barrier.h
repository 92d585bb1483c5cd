// Barriers: of a CTA, of a cluster of CTAs, of the whole grid.
#pragma once

#include "device/memory.h"

namespace xpress::device {

// All threads of the CTA arrive before any leaves; what they wrote is seen by all.
XPRESS_DEVICE void cta_sync() {
#ifdef XPRESS_EMULATE
  emulator::cta_barrier();
#else
  __syncthreads();
#endif
}

// Clusters exist from compute capability 9.0 on. Elsewhere, and where a kernel is launched without
// them, every CTA is a cluster of its own and the functions below still hold.
XPRESS_DEVICE int cluster_size() {
#if defined(XPRESS_EMULATE)
  return emulator::cluster_size();
#elif __CUDA_ARCH__ >= 900
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

XPRESS_DEVICE int cluster_rank() {
#if defined(XPRESS_EMULATE)
  return emulator::cluster_rank();
#elif __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// The address, in CTA `rank` of the cluster, of what lies at `shared` in this CTA's shared memory.
// A CTA must not leave before the others have done with its shared memory: cluster_sync() first.
template <class T>
XPRESS_DEVICE T* cluster_map(T* shared, int rank) {
#if defined(XPRESS_EMULATE)
  return static_cast<T*>(emulator::cluster_map(shared, rank));
#elif __CUDA_ARCH__ >= 900
  uint64_t mapped;
  asm volatile("mapa.u64 %0, %1, %2;"
               : "=l"(mapped)
               : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
  return reinterpret_cast<T*>(mapped);
#else
  return shared;
#endif
}

// All threads of the cluster arrive before any leaves; what they wrote is seen by all.
XPRESS_DEVICE void cluster_sync() {
#if defined(XPRESS_EMULATE)
  emulator::cluster_barrier();
#elif __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The counter of a grid barrier, on a cache line of its own. Zero before its first use; it may be
// used any number of times, by any number of launches of equal grids.
struct alignas(128) GridBarrier {
  uint32_t arrived;
};

// All threads of the grid arrive before any leaves. Needs a cooperative launch: a CTA that is not
// resident would be waited for without end.
//
// Memory order: cta_sync() orders the CTA's writes before its first thread's release-add; the
// counter's modifications form one release sequence, so a thread whose acquire load sees all
// arrivals also sees every write before them; the second cta_sync() hands that on to its CTA. The
// counter only grows (modulo 2^32), and an arrival's round ends at the next multiple of the grid's
// size, so no reset is needed that a slow CTA could miss.
XPRESS_DEVICE void grid_sync(GridBarrier* barrier) {
  cta_sync();
  if (thread_index() == 0) {
    const uint32_t size = static_cast<uint32_t>(cta_count());
    const uint32_t before = atomic_add_release(&barrier->arrived, 1);
    const uint32_t round_end = before - before % size + size;
    while (static_cast<int32_t>(load_acquire(&barrier->arrived) - round_end) < 0) {
    }
  }
  cta_sync();
}

}  // namespace xpress::device
