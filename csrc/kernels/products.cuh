// The one product of this library: acc += A * B^T for 16 rows of activations A and 8 rows of
// weights B, with the one order of accumulation that all kernels share (docs/kernels.md).
//
// 16-bit types: steps of 32 k, each two tensor-core products. The instruction wants from lane
// (g = lane / 4, t = lane % 4) the values at k = 2t, 2t+1, 2t+8, 2t+9. Since the sum does not care
// how k is numbered as long as A and B agree, product i of a step takes for these k the values at
// 8t+4i, 8t+4i+1, 8t+4i+2, 8t+4i+3 instead: together the 16 contiguous bytes at 8t of the lane's
// row, one load. fp32: the 32 k of a step are one chain of fused multiply-adds per element, k
// ascending, whose sum joins the steps before it: a blocked sum, as accurate as torch's.
//
// In both cases a lane owns acc[0], acc[1]: row g, columns 2t and 2t+1, and acc[2], acc[3]: row
// g+8, the same columns; and the operands come as functions (row, k) -> the 16 bytes at element k
// of a row, so that they may lie in global memory, in shared memory or in registers.
#pragma once

#include <type_traits>

#include "device/memory.h"
#include "device/warp.h"

namespace xpress::kernels {

using device::Bytes16;

constexpr int kProductRows = 16;
constexpr int kProductColumns = 8;
constexpr int kProductStep = 32;  // r, H and m are multiples of it

// Rows [*, stride] in global memory.
template <class T>
struct GlobalRows {
  const T* data;
  int64_t stride;

  XPRESS_DEVICE Bytes16 operator()(int row, int k) const {
    return device::load_global(reinterpret_cast<const Bytes16*>(data + row * stride + k));
  }
};

// The first `count` of rows [*, stride] in global memory that no kernel writes while this one runs;
// the other rows are zero and not read.
template <class T>
struct GuardedRows {
  const T* data;
  int64_t stride;
  int count;

  XPRESS_DEVICE Bytes16 operator()(int row, int k) const {
    return device::load_global_or_zero(data + row * stride + k, row < count);
  }
};

// Rows [*, stride] in shared memory.
template <class T>
struct SharedRows {
  const T* data;
  int stride;

  XPRESS_DEVICE Bytes16 operator()(int row, int k) const {
    return *reinterpret_cast<const Bytes16*>(data + row * stride + k);
  }
};

// The stride at which rows of `width` elements (a multiple of 32) lie in shared memory without bank
// conflicts: eight lanes that load together touch 64 bytes of each of two neighbouring rows, so a
// row must end in the middle of a line of 128 bytes.
template <class T>
XPRESS_HOST_DEVICE constexpr int padded_stride(int width) {
  const int bytes = width * static_cast<int>(sizeof(T));
  return bytes % 128 == 0 ? width + 64 / static_cast<int>(sizeof(T)) : width;
}

// One step of 16-bit products, from the 16 bytes at k = 8t of rows g and g+8 of A and of row g of
// B.
template <class T>
XPRESS_DEVICE void mma_step(float (&acc)[4], const Bytes16& a_low, const Bytes16& a_high,
                            const Bytes16& b) {
  XPRESS_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t a[4] = {a_low.word[2 * i], a_high.word[2 * i], a_low.word[2 * i + 1],
                           a_high.word[2 * i + 1]};
    const uint32_t columns[2] = {b.word[2 * i], b.word[2 * i + 1]};
    device::mma_16x8x16<T>(acc, a, columns);
  }
}

XPRESS_DEVICE float float_of(const Bytes16& bytes, int i) {
  return device::bits_to_float(bytes.word[i]);
}

// acc += the products of k = k0 ... k0+31.
template <class T, class A, class B>
XPRESS_DEVICE void product_step(float (&acc)[4], const A& a, const B& b, int k0) {
  const int g = device::lane_index() / 4, t = device::lane_index() % 4;
  if constexpr (std::is_same_v<T, float>) {
    float sums[4] = {};
    XPRESS_UNROLL_BY(1)  // unrolled, the many products of a tile would not fit into registers
    for (int k = k0; k < k0 + kProductStep; k += 4) {
      const Bytes16 a_low = a(g, k), a_high = a(g + 8, k), b0 = b(2 * t, k), b1 = b(2 * t + 1, k);
      XPRESS_UNROLL
      for (int i = 0; i < 4; ++i) {
        sums[0] = device::fma(float_of(a_low, i), float_of(b0, i), sums[0]);
        sums[1] = device::fma(float_of(a_low, i), float_of(b1, i), sums[1]);
        sums[2] = device::fma(float_of(a_high, i), float_of(b0, i), sums[2]);
        sums[3] = device::fma(float_of(a_high, i), float_of(b1, i), sums[3]);
      }
    }
    XPRESS_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] += sums[i];
  } else {
    mma_step<T>(acc, a(g, k0 + 8 * t), a(g + 8, k0 + 8 * t), b(g, k0 + 8 * t));
  }
}

// Rows of which this lane's bytes of the step at k0 are held in registers, for several products.
// Of fp32 rows a lane needs more than registers have room for: they are read each time.
template <class T, class Rows>
struct HeldRows {
  Rows rows;
  Bytes16 low, high;  // of rows g and g+8

  XPRESS_DEVICE Bytes16 operator()(int row, int k) const {
    if constexpr (std::is_same_v<T, float>) {
      return rows(row, k);
    } else {
      return row < kProductColumns ? low : high;
    }
  }
};

// For A of product_step().
template <class T, class Rows>
XPRESS_DEVICE HeldRows<T, Rows> hold_16_rows(const Rows& rows, int k0) {
  if constexpr (std::is_same_v<T, float>) {
    return {rows, {}, {}};
  } else {
    const int g = device::lane_index() / 4, t = device::lane_index() % 4;
    return {rows, rows(g, k0 + 8 * t), rows(g + 8, k0 + 8 * t)};
  }
}

// For B of product_step().
template <class T, class Rows>
XPRESS_DEVICE HeldRows<T, Rows> hold_8_rows(const Rows& rows, int k0) {
  if constexpr (std::is_same_v<T, float>) {
    return {rows, {}, {}};
  } else {
    const int g = device::lane_index() / 4, t = device::lane_index() % 4;
    return {rows, rows(g, k0 + 8 * t), {}};
  }
}

// acc[i] += A * B_i^T over k = 0 ... width-1. Several steps of 16-bit B, which may come from far,
// are loaded before the first of them is used.
template <class T, int kCount, class A, class B>
XPRESS_DEVICE void products(float (&acc)[kCount][4], const A& a, const B (&b)[kCount], int width) {
  constexpr int kSteps = std::is_same_v<T, float> ? 1 : 8 / kCount;
  for (int first = 0; first < width; first += kSteps * kProductStep) {
    Bytes16 held[kSteps][kCount];
    XPRESS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int k0 = first + step * kProductStep;
      if (k0 >= width) break;
      XPRESS_UNROLL
      for (int i = 0; i < kCount; ++i) held[step][i] = hold_8_rows<T>(b[i], k0).low;
    }
    XPRESS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int k0 = first + step * kProductStep;
      if (k0 >= width) break;
      const auto rows = hold_16_rows<T>(a, k0);
      XPRESS_UNROLL
      for (int i = 0; i < kCount; ++i) {
        product_step<T>(acc[i], rows, HeldRows<T, B>{b[i], held[step][i], {}}, k0);
      }
    }
  }
}

// acc += A * B^T over k = 0 ... width-1.
template <class T, class A, class B>
XPRESS_DEVICE void product(float (&acc)[4], const A& a, const B& b, int width) {
  if constexpr (std::is_same_v<T, float>) {
    for (int k0 = 0; k0 < width; k0 += kProductStep) product_step<T>(acc, a, b, k0);
  } else {
    float sums[1][4] = {{acc[0], acc[1], acc[2], acc[3]}};
    products<T>(sums, a, {b}, width);
    XPRESS_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] = sums[0][i];
  }
}

// Calls visit(row, column, value) for the four elements of a [16, 8] product that this lane owns.
template <class Visit>
XPRESS_DEVICE void for_each_element(const float (&acc)[4], const Visit& visit) {
  const int g = device::lane_index() / 4, t = device::lane_index() % 4;
  visit(g, 2 * t, acc[0]);
  visit(g, 2 * t + 1, acc[1]);
  visit(g + 8, 2 * t, acc[2]);
  visit(g + 8, 2 * t + 1, acc[3]);
}

}  // namespace xpress::kernels
