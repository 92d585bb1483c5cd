// Conversions between the storage types and fp32, and the fp32 functions that kernels call.
//
// The library is compiled without contraction of products and sums: a fused multiply-add happens
// where fma() is written, and nowhere else.
#pragma once

#include <cmath>
#include <cstring>

#include "device/language.h"
#include "xpress/argmax_key.h"
#include "xpress/dtype.h"

namespace xpress::device {

XPRESS_DEVICE float bits_to_float(uint32_t bits) {
#ifdef XPRESS_EMULATE
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#else
  return __uint_as_float(bits);
#endif
}

XPRESS_DEVICE uint32_t float_to_bits(float value) {
#ifdef XPRESS_EMULATE
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#else
  return __float_as_uint(value);
#endif
}

XPRESS_DEVICE float to_float(float value) { return value; }

XPRESS_DEVICE float to_float(bf16 value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

XPRESS_DEVICE float to_float(fp16 value) {
#ifdef XPRESS_EMULATE
  return emulator::half_to_float(value.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#endif
}

// Rounds to nearest, ties to even.
template <class T>
XPRESS_DEVICE T round_to(float value);

template <>
XPRESS_DEVICE float round_to<float>(float value) {
  return value;
}

template <>
XPRESS_DEVICE bf16 round_to<bf16>(float value) {
  bf16 narrow;
#ifdef XPRESS_EMULATE
  narrow.bits = emulator::float_to_bfloat(value);
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#endif
  return narrow;
}

template <>
XPRESS_DEVICE fp16 round_to<fp16>(float value) {
  fp16 narrow;
#ifdef XPRESS_EMULATE
  narrow.bits = emulator::float_to_half(value);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
#endif
  return narrow;
}

// Two 16-bit values in one register, the first in the low half.
template <class T>
XPRESS_DEVICE uint32_t pack(T low, T high) {
  return static_cast<uint32_t>(low.bits) | (static_cast<uint32_t>(high.bits) << 16);
}

XPRESS_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
XPRESS_DEVICE double fma(double a, double b, double c) { return ::fma(a, b, c); }

// x * sigmoid(x), in the accurate functions.
XPRESS_DEVICE float silu(float x) { return x / (1.0f + ::expf(-x)); }

}  // namespace xpress::device
