// Arithmetic of the emulated GPU: conversions and the tensor cores.
#include <cmath>
#include <cstring>

#include "emulator/machine.h"

namespace xpress::emulator {

namespace {

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

struct MmaOperand {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// The two values of a register.
template <bool kBfloat>
void unpack(uint32_t pair, float* low, float* high) {
  if (kBfloat) {
    *low = from_bits(pair << 16);
    *high = from_bits(pair & 0xffff0000u);
  } else {
    *low = half_to_float(static_cast<uint16_t>(pair));
    *high = half_to_float(static_cast<uint16_t>(pair >> 16));
  }
}

// Products are exact and their sum is kept in fp64, then rounded once: within the tensor cores' own
// error, though not bit for bit theirs.
template <bool kBfloat>
void multiply(void* const operands[32]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* o = static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    unpack<kBfloat>(o->a[0], &a[g][2 * t], &a[g][2 * t + 1]);
    unpack<kBfloat>(o->a[1], &a[g + 8][2 * t], &a[g + 8][2 * t + 1]);
    unpack<kBfloat>(o->a[2], &a[g][2 * t + 8], &a[g][2 * t + 9]);
    unpack<kBfloat>(o->a[3], &a[g + 8][2 * t + 8], &a[g + 8][2 * t + 9]);
    unpack<kBfloat>(o->b[0], &b[2 * t][g], &b[2 * t + 1][g]);
    unpack<kBfloat>(o->b[1], &b[2 * t + 8][g], &b[2 * t + 9][g]);
  }
  double sums[16][8] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      const double left = a[row][k];
      for (int column = 0; column < 8; ++column) sums[row][column] += left * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* o = static_cast<const MmaOperand*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const double sum = sums[g + 8 * (i / 2)][2 * t + i % 2];
      o->d[i] = static_cast<float>(o->d[i] + sum);
    }
  }
}

}  // namespace

void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool is_bfloat) {
  MmaOperand operand{d, a, b};
  warp_collective(0xffffffffu, is_bfloat ? "mma of bf16" : "mma of fp16", &operand,
                  is_bfloat ? multiply<true> : multiply<false>);
}

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return from_bits(sign | to_bits(magnitude));
  }
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

uint16_t float_to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(value);
  if (value != value) return 0x7fff;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {
    // Subnormal: a multiple of 2^-24, rounded to nearest even by nearbyint.
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  const uint32_t m = bits & 0x7fffffffu;
  const uint32_t rounded = m + 0xfffu + (m >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

uint16_t float_to_bfloat(float value) {
  if (value != value) return 0x7fff;
  const uint32_t bits = to_bits(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

}  // namespace xpress::emulator
