// Sixteen fp32 lanes, written once for AVX-512, AVX2 and portable C++.
//
// Every operator is written on F16 and compiled three times, so the three builds perform the same
// fp32 operations in the same order and give the same bits. Nothing here may depend on the
// instruction set but the spelling: no approximate reciprocals, no reassociation, no contraction
// of a * b + c (the build passes -ffp-contract=off; a fused multiply-add is always written fma).
//
// Functions are static or live in the namespace of their instruction set: an inline function that
// two builds share could be merged by the linker into the copy that the CPU cannot run.
#pragma once

#include <cstdint>
#include <cstring>

#include "xpress/argmax_key.h"
#include "xpress/dtype.h"

#if defined(XPRESS_CPU_ISA_AVX512)
#include <immintrin.h>
#define XPRESS_CPU_NAMESPACE avx512
#elif defined(XPRESS_CPU_ISA_AVX2)
#include <immintrin.h>
#define XPRESS_CPU_NAMESPACE avx2
#elif defined(XPRESS_CPU_ISA_PORTABLE)
#define XPRESS_CPU_NAMESPACE portable
#else
#error "csrc/cpu is compiled with XPRESS_CPU_ISA_AVX512, _AVX2 or _PORTABLE (see CMakeLists.txt)"
#endif

#define XPRESS_INLINE inline __attribute__((always_inline))

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

constexpr int kLanes = 16;

static XPRESS_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static XPRESS_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static XPRESS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static XPRESS_INLINE void prefetch(const void* address) { __builtin_prefetch(address); }

// ---- 16-bit conversions, one element --------------------------------------------------------

static XPRESS_INLINE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

static XPRESS_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

static XPRESS_INLINE float to_float(float x) { return x; }
static XPRESS_INLINE float to_float(bf16 x) {
  return bits_to_float(static_cast<uint32_t>(x.bits) << 16);
}

static XPRESS_INLINE float to_float(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, or NaN made quiet as the hardware does
    const uint32_t mantissa = magnitude & 0x3ffu;
    return bits_to_float(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  }
  if (magnitude < 0x400u) {  // subnormal or zero: magnitude * 2^-24 is exact in fp32
    return bits_to_float(sign | float_to_bits(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
}

static XPRESS_INLINE void from_float(float x, float* out) { *out = x; }

// Round to nearest even; every NaN becomes the canonical one.
static XPRESS_INLINE void from_float(float x, bf16* out) {
  const uint32_t bits = float_to_bits(x);
  out->bits =
      (x != x) ? 0x7fc0u : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static XPRESS_INLINE void from_float(float x, fp16* out) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {  // NaN: the canonical one
    out->bits = 0x7e00u;
    return;
  }
  if (magnitude >= 0x477ff000u) {  // rounds beyond 65504
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: let the fp32 adder round at 2^-24
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | half);
}

// ---- F16: sixteen fp32 lanes ----------------------------------------------------------------

#if defined(XPRESS_CPU_ISA_AVX512)

struct F16 {
  __m512 v;
};

static XPRESS_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
static XPRESS_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static XPRESS_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static XPRESS_INLINE F16 load(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
static XPRESS_INLINE F16 load(const fp16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static XPRESS_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static XPRESS_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static XPRESS_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static XPRESS_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static XPRESS_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// As the instruction: b where either is NaN.
static XPRESS_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static XPRESS_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }

// 2^n where `shifted` is n + 0x1.8p23.
static XPRESS_INLINE F16 exp2_of_shifted(F16 shifted) {
  const __m512i n = _mm512_add_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}

// Bit i is set where a_i > b_i or either is NaN.
static XPRESS_INLINE uint32_t mask_not_le(F16 a, F16 b) {
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ);
}

static XPRESS_INLINE F16 round_to(F16 a, bf16) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_and_si512(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd),
                       _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)))};
}

static XPRESS_INLINE F16 round_to(F16 a, fp16) {
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  const __m512 canonical = _mm512_mask_mov_ps(a.v, nan, quiet);
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(canonical, _MM_FROUND_TO_NEAREST_INT))};
}

// The sixteen lanes of each of four vectors are summed by one fixed tree: lane i with i + 8, then
// i + 4, i + 2, i + 1. out[0], out[4], out[8], out[12] receive the four sums.
static XPRESS_INLINE void sum_lanes_of_4(F16 a, F16 b, F16 c, F16 d, float* out, int position) {
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
  __m512 abcd =
      _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  abcd = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0x4E));
  abcd = _mm512_add_ps(abcd, _mm512_permute_ps(abcd, 0xB1));
  _mm512_mask_storeu_ps(out, static_cast<__mmask16>(0x1111u << position), abcd);
}

#elif defined(XPRESS_CPU_ISA_AVX2)

struct F16 {
  __m256 lo, hi;
};

static XPRESS_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static XPRESS_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static XPRESS_INLINE F16 load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static XPRESS_INLINE __m256 widen_bf16(const bf16* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static XPRESS_INLINE F16 load(const bf16* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
static XPRESS_INLINE F16 load(const fp16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static XPRESS_INLINE void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static XPRESS_INLINE F16 add(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static XPRESS_INLINE F16 mul(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static XPRESS_INLINE F16 div(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static XPRESS_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static XPRESS_INLINE F16 min(F16 a, F16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static XPRESS_INLINE F16 max(F16 a, F16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static XPRESS_INLINE __m256 exp2_of_shifted_half(__m256 shifted) {
  const __m256i n = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
static XPRESS_INLINE F16 exp2_of_shifted(F16 shifted) {
  return {exp2_of_shifted_half(shifted.lo), exp2_of_shifted_half(shifted.hi)};
}
static XPRESS_INLINE uint32_t mask_not_le(F16 a, F16 b) {
  const uint32_t lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_NLE_UQ));
  const uint32_t hi = _mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_NLE_UQ));
  return lo | (hi << 8);
}
static XPRESS_INLINE __m256 canonical_nan(__m256 a) {
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(a, quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static XPRESS_INLINE __m256 round_half_to(__m256 a, bf16) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_and_si256(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd),
                       _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static XPRESS_INLINE __m256 round_half_to(__m256 a, fp16) {
  return _mm256_cvtph_ps(_mm256_cvtps_ph(canonical_nan(a), _MM_FROUND_TO_NEAREST_INT));
}
template <class T>
static XPRESS_INLINE F16 round_to(F16 a, T type) {
  return {round_half_to(a.lo, type), round_half_to(a.hi, type)};
}
static XPRESS_INLINE float sum_lanes(F16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

#else  // portable

struct F16 {
  float v[kLanes];
};

#define XPRESS_LANEWISE(expression)                         \
  F16 out;                                                  \
  for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
  return out

static XPRESS_INLINE F16 zero() { XPRESS_LANEWISE(0.0f); }
static XPRESS_INLINE F16 set1(float x) { XPRESS_LANEWISE(x); }
template <class T>
static XPRESS_INLINE F16 load(const T* p) {
  XPRESS_LANEWISE(to_float(p[i]));
}
static XPRESS_INLINE void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof(a.v)); }
static XPRESS_INLINE F16 add(F16 a, F16 b) { XPRESS_LANEWISE(a.v[i] + b.v[i]); }
static XPRESS_INLINE F16 mul(F16 a, F16 b) { XPRESS_LANEWISE(a.v[i] * b.v[i]); }
static XPRESS_INLINE F16 div(F16 a, F16 b) { XPRESS_LANEWISE(a.v[i] / b.v[i]); }
static XPRESS_INLINE F16 fma(F16 a, F16 b, F16 c) {
  XPRESS_LANEWISE(__builtin_fmaf(a.v[i], b.v[i], c.v[i]));
}
static XPRESS_INLINE F16 min(F16 a, F16 b) { XPRESS_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static XPRESS_INLINE F16 max(F16 a, F16 b) { XPRESS_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static XPRESS_INLINE F16 exp2_of_shifted(F16 shifted) {
  XPRESS_LANEWISE(bits_to_float((float_to_bits(shifted.v[i]) + 127u) << 23));
}
static XPRESS_INLINE uint32_t mask_not_le(F16 a, F16 b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(!(a.v[i] <= b.v[i])) << i;
  return mask;
}
template <class T>
static XPRESS_INLINE F16 round_to(F16 a, T rounded) {
  F16 out;
  for (int i = 0; i < kLanes; ++i) {
    from_float(a.v[i], &rounded);
    out.v[i] = to_float(rounded);
  }
  return out;
}
static XPRESS_INLINE float sum_lanes(F16 a) {
  for (int width = kLanes / 2; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
  }
  return a.v[0];
}
#undef XPRESS_LANEWISE

#endif

#if !defined(XPRESS_CPU_ISA_AVX512)
static XPRESS_INLINE void sum_lanes_of_4(F16 a, F16 b, F16 c, F16 d, float* out, int position) {
  out[position] = sum_lanes(a);
  out[position + 4] = sum_lanes(b);
  out[position + 8] = sum_lanes(c);
  out[position + 12] = sum_lanes(d);
}
#endif

static XPRESS_INLINE F16 round_to(F16 a, float) { return a; }

// Stores sixteen lanes in the element type of p, rounded to nearest even.
template <class T>
static XPRESS_INLINE void store_as(T* p, F16 a) {
  float lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) from_float(lanes[i], p + i);
}

// e^x within 1 ulp for x in [-87, 88], clamped outside.
static XPRESS_INLINE F16 exp_clamped(F16 x) {
  x = max(min(x, set1(88.0f)), set1(-87.0f));
  const F16 shift = set1(0x1.8p23f);
  const F16 shifted = fma(x, set1(0x1.715476p+0f), shift);  // round(x / ln 2), kept in low bits
  const F16 n = add(shifted, set1(-0x1.8p23f));
  F16 t = fma(n, set1(-0x1.62e400p-1f), x);  // ln 2, high part
  t = fma(n, set1(-0x1.7f7d1cp-20f), t);     // ln 2, low part
  F16 p = set1(0x1.6850e4p-10f);
  p = fma(p, t, set1(0x1.123bccp-7f));
  p = fma(p, t, set1(0x1.555b98p-5f));
  p = fma(p, t, set1(0x1.55548ep-3f));
  p = fma(p, t, set1(0x1.fffff8p-2f));
  p = fma(p, t, set1(1.0f));
  p = fma(p, t, set1(1.0f));
  return mul(p, exp2_of_shifted(shifted));
}

// silu(g) * u = g / (1 + e^-g) * u
static XPRESS_INLINE F16 silu_times(F16 g, F16 u) {
  const F16 e = exp_clamped(mul(g, set1(-1.0f)));
  return mul(div(g, add(set1(1.0f), e)), u);
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
