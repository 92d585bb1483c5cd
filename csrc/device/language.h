// The words that kernels are written in: function attributes, the place of a thread in its grid,
// shared memory. Every primitive in this folder has two bodies, one for the GPU and one for the
// emulator (csrc/emulator), and kernels (csrc/kernels) use nothing else of either.
//
// Grids and CTAs are one-dimensional.
#pragma once

#include <cstdint>

#ifdef XPRESS_EMULATE
#include "emulator/machine.h"
#define XPRESS_DEVICE inline
#define XPRESS_KERNEL(max_threads) void
#define XPRESS_LARGE_KERNEL(max_threads) void
#define XPRESS_UNROLL
#define XPRESS_UNROLL_BY(count) static_assert((count) >= 1, "an unroll factor");
#else
#define XPRESS_DEVICE __device__ __forceinline__
#define XPRESS_KERNEL(max_threads) __global__ void __launch_bounds__(max_threads)
// One whose CTA may have all registers of an SM.
#define XPRESS_LARGE_KERNEL(max_threads) __global__ void __launch_bounds__(max_threads, 1)
#define XPRESS_PRAGMA(text) _Pragma(#text)
#define XPRESS_UNROLL XPRESS_PRAGMA(unroll)
#define XPRESS_UNROLL_BY(count) XPRESS_PRAGMA(unroll count)
#endif

namespace xpress::device {

constexpr int kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

#ifdef XPRESS_EMULATE

XPRESS_DEVICE int thread_index() { return emulator::thread_index(); }
XPRESS_DEVICE int thread_count() { return emulator::thread_count(); }
XPRESS_DEVICE int64_t cta_index() { return emulator::cta_index(); }
XPRESS_DEVICE int64_t cta_count() { return emulator::cta_count(); }
// The CTA's dynamic shared memory, aligned to 1024 bytes; its contents are undefined at the start.
XPRESS_DEVICE char* shared_memory() { return emulator::shared_memory(); }

#else

XPRESS_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
XPRESS_DEVICE int thread_count() { return static_cast<int>(blockDim.x); }
XPRESS_DEVICE int64_t cta_index() { return blockIdx.x; }
XPRESS_DEVICE int64_t cta_count() { return gridDim.x; }
XPRESS_DEVICE char* shared_memory() {
  extern __shared__ __align__(1024) char xpress_shared_memory[];
  return xpress_shared_memory;
}

#endif

XPRESS_DEVICE int lane_index() { return thread_index() % kWarpSize; }
XPRESS_DEVICE int warp_index() { return thread_index() / kWarpSize; }
XPRESS_DEVICE int warp_count() { return thread_count() / kWarpSize; }

}  // namespace xpress::device
