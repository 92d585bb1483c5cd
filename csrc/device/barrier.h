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

// A grid barrier, on a cache line of its own. All zero before its first use; it may then be used
// any number of times, by any grids one after another.
struct alignas(128) GridBarrier {
  uint32_t arrived;     // CTAs of the round that is under way
  uint32_t generation;  // rounds that are over
};

// All threads of the grid arrive before any leaves. Needs a cooperative launch: a CTA that is not
// resident would be waited for without end.
//
// Memory order: the first cta_sync() puts the CTA's writes before its first thread's add. The adds
// are acquire-release on one counter, so the last CTA to arrive has seen the writes of all; it then
// resets the counter and moves the generation on with a release, and whoever's acquire load sees
// the new generation sees all of that. The second cta_sync() hands it to the CTA's other threads.
// The generation was read before this CTA arrived, and the round cannot end before that, so no CTA
// can miss the change; nobody adds to the next round before it has seen this one end, that is,
// after the reset.
XPRESS_DEVICE void grid_sync(GridBarrier* barrier) {
  cta_sync();
  if (thread_index() == 0) {
    const uint32_t generation = load_acquire(&barrier->generation);
    const uint32_t arrived = atomic_add_acquire_release(&barrier->arrived, 1) + 1;
    if (arrived == static_cast<uint32_t>(cta_count())) {
      store_global(&barrier->arrived, 0u);
      atomic_add_acquire_release(&barrier->generation, 1);
    } else {
      while (load_acquire(&barrier->generation) == generation) {
      }
    }
  }
  cta_sync();
}

}  // namespace xpress::device
