// What the 32 lanes of a warp do together. Every lane of the warp calls these, none may be missing.
#pragma once

#include "device/language.h"
#include "device/numbers.h"

namespace xpress::device {

XPRESS_DEVICE void warp_sync() {
#ifdef XPRESS_EMULATE
  emulator::warp_sync(kAllLanes);
#else
  __syncwarp();
#endif
}

// The value of lane (lane_index() ^ lane_mask). T has 4 or 8 bytes.
template <class T>
XPRESS_DEVICE T shuffle_xor(T value, int lane_mask) {
#ifdef XPRESS_EMULATE
  return emulator::shuffle(kAllLanes, value, thread_index() % kWarpSize ^ lane_mask);
#else
  return __shfl_xor_sync(kAllLanes, value, lane_mask);
#endif
}

// The value of lane `source`.
template <class T>
XPRESS_DEVICE T shuffle(T value, int source) {
#ifdef XPRESS_EMULATE
  return emulator::shuffle(kAllLanes, value, source);
#else
  return __shfl_sync(kAllLanes, value, source);
#endif
}

// Bit l is set where lane l's predicate holds.
XPRESS_DEVICE uint32_t ballot(bool predicate) {
#ifdef XPRESS_EMULATE
  return emulator::ballot(kAllLanes, predicate);
#else
  return __ballot_sync(kAllLanes, predicate);
#endif
}

// The lowest set bit of a mask that has one.
XPRESS_DEVICE int lowest_bit(uint32_t mask) {
#ifdef XPRESS_EMULATE
  return __builtin_ctz(mask);
#else
  return __ffs(static_cast<int>(mask)) - 1;
#endif
}

XPRESS_DEVICE uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

// The greatest key of the warp, in every lane.
XPRESS_DEVICE uint64_t warp_max(uint64_t key) {
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const uint64_t other =
        static_cast<uint64_t>(shuffle_xor(static_cast<unsigned long long>(key), mask));
    key = max(key, other);
  }
  return key;
}

// d += a * b on the tensor cores: a [16, 16], b [16, 8], d [16, 8], products exact, sums in fp32.
// With g = lane / 4 and t = lane % 4 a lane holds, two values a register:
//   a[0]: row g,   columns 2t, 2t+1     a[2]: row g,   columns 2t+8, 2t+9
//   a[1]: row g+8, columns 2t, 2t+1     a[3]: row g+8, columns 2t+8, 2t+9
//   b[0]: rows 2t, 2t+1 of column g     b[1]: rows 2t+8, 2t+9 of column g
//   d[0], d[1]: row g, columns 2t, 2t+1     d[2], d[3]: row g+8, the same columns
// T, the type of a and b, is bf16 or fp16.
template <class T>
XPRESS_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
XPRESS_DEVICE void mma_16x8x16<bf16>(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
#ifdef XPRESS_EMULATE
  emulator::mma_16x8x16(d, a, b, /*is_bfloat=*/true);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

template <>
XPRESS_DEVICE void mma_16x8x16<fp16>(float (&d)[4], const uint32_t (&a)[4],
                                     const uint32_t (&b)[2]) {
#ifdef XPRESS_EMULATE
  emulator::mma_16x8x16(d, a, b, /*is_bfloat=*/false);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace xpress::device
