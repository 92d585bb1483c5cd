// The one matrix product of the CPU backend: dot products of weight rows with activation rows.
//
// Every product of the method (hidden projection, MLP, readout, full or over candidates) goes
// through accumulate_tile, so a dot product's value depends on its two rows only: sixteen strided
// fp32 fma chains (chain i takes k = i mod 16, ascending), then the fixed tree of sum_lanes_of_4.
// It is the same whatever other rows are computed beside it.
//
// Bound: one fma per 16 products. A tile of 4 weight rows by up to 6 activation rows keeps 24
// accumulators in registers (AVX-512 has 32), so 10 loads feed 24 fmas and the fma units are the
// limit. AVX2 has 16 registers of half the width: 3 activation rows by 2 weight rows at a time.
#pragma once

#include "vec.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

#if defined(XPRESS_CPU_ISA_AVX512)
constexpr int kTileW = 4;
constexpr int kTileX = 6;
#else
constexpr int kTileW = 2;
constexpr int kTileX = 3;
#endif
constexpr int kPanel = 16;        // weight rows per panel
constexpr int kMaxWidened = 512;  // longest weight row that is widened on the stack

// chains[i][j] = the sixteen chains of w[i] . x[j], k from 0 to K in steps of 16.
template <int kW, int kX, class T>
static XPRESS_INLINE void accumulate_tile(const T* const* w, const float* const* x, int64_t K,
                                          F16 (*chains)[kX]) {
  F16 acc[kW][kX];
  for (int i = 0; i < kW; ++i) {
    for (int j = 0; j < kX; ++j) acc[i][j] = zero();
  }
  for (int64_t k = 0; k < K; k += kLanes) {
    F16 rw[kW];
#pragma GCC unroll 8
    for (int i = 0; i < kW; ++i) rw[i] = load(w[i] + k);
#pragma GCC unroll 8
    for (int j = 0; j < kX; ++j) {
      const F16 rx = load(x[j] + k);
#pragma GCC unroll 8
      for (int i = 0; i < kW; ++i) acc[i][j] = fma(rw[i], rx, acc[i][j]);
    }
  }
  for (int i = 0; i < kW; ++i) {
    for (int j = 0; j < kX; ++j) chains[i][j] = acc[i][j];
  }
}

// Four weight rows w[0..3] with kX activation rows: sums go to out[j * kPanel + 4 * i + position].
template <int kX, class T>
static XPRESS_INLINE void dot_4_rows(const T* const* w, const float* const* x, int64_t K,
                                     float* out, int position) {
  F16 acc[4][kX];
  for (int i = 0; i < 4; i += kTileW) accumulate_tile<kTileW, kX>(w + i, x, K, acc + i);
  for (int j = 0; j < kX; ++j) {
    sum_lanes_of_4(acc[0][j], acc[1][j], acc[2][j], acc[3][j], out + j * kPanel, position);
  }
}

// Memory that the next panel will read, fetched into the second-level cache a few lines at a time
// while this panel is multiplied, so that the stream from memory never waits for the arithmetic.
struct Ahead {
  const char* next = nullptr;
  const char* end = nullptr;
  int64_t step = 0;  // bytes per group of four weight rows

  static Ahead of(const void* begin, int64_t bytes, int64_t activation_rows) {
    const int64_t groups = 4 * ceil_div(activation_rows, kTileX);
    const char* first = static_cast<const char*>(begin);
    return {first, first + bytes, ceil_div(ceil_div(bytes, groups), 64) * 64};
  }

  XPRESS_INLINE void fetch() {
    const char* stop = next + step < end ? next + step : end;
    for (; next < stop; next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// A panel of 16 weight rows w, w + ldw, ... with kX activation rows: out[j * kPanel + row].
template <int kX, class T>
static void dot_panel_tile(const T* w, int64_t ldw, const float* const* x, int64_t K, float* out,
                           Ahead* ahead) {
  for (int position = 0; position < 4; ++position) {
    const T* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = w + (4 * i + position) * ldw;
    ahead->fetch();
    dot_4_rows<kX>(rows, x, K, out, position);
  }
}

template <class T>
static void dot_panel_of(int count, const T* w, int64_t ldw, const float* const* x, int64_t K,
                         float* out, Ahead* ahead) {
  switch (count) {
    case 1:
      return dot_panel_tile<1>(w, ldw, x, K, out, ahead);
    case 2:
      return dot_panel_tile<2>(w, ldw, x, K, out, ahead);
    case 3:
      return dot_panel_tile<3>(w, ldw, x, K, out, ahead);
#if defined(XPRESS_CPU_ISA_AVX512)
    case 4:
      return dot_panel_tile<4>(w, ldw, x, K, out, ahead);
    case 5:
      return dot_panel_tile<5>(w, ldw, x, K, out, ahead);
    default:
      return dot_panel_tile<6>(w, ldw, x, K, out, ahead);
#endif
  }
}

// Calls f(j, out) for each of `rows` activation rows x[j], out the sixteen dot products of x[j]
// with the panel's weight rows.
template <class T, class F>
static XPRESS_INLINE void for_each_panel_row(const T* w, int64_t ldw, const float* const* x,
                                             int64_t rows, int64_t K, const F& f,
                                             Ahead ahead = {}) {
  alignas(64) float out[kTileX * kPanel];
  const int64_t tiles = ceil_div(rows, kTileX);
  for (int64_t tile = 0, begin = 0; tile < tiles; ++tile) {
    const int64_t count = ceil_div(rows - begin, tiles - tile);  // tiles of nearly equal size
    dot_panel_of(static_cast<int>(count), w, ldw, x + begin, K, out, &ahead);
    for (int64_t j = 0; j < count; ++j) f(begin + j, out + j * kPanel);
    begin += count;
  }
}

// A row of K elements as fp32.
template <class S>
static XPRESS_INLINE void widen_row(const S* source, int64_t K, float* out) {
  for (int64_t k = 0; k < K; k += kLanes) store(out + k, load(source + k));
}

// Copies `rows` (<= 16) weight rows to fp32, missing rows as zeros. Worth it where a panel meets
// several tiles of activation rows, and where the last panel of a matrix is not full.
template <class T>
static XPRESS_INLINE void widen_panel(const T* w, int64_t ldw, int64_t rows, int64_t K,
                                      float* panel) {
  for (int64_t i = 0; i < rows; ++i) widen_row(w + i * ldw, K, panel + i * K);
  for (int64_t k = rows * K; k < kPanel * K; k += kLanes) store(panel + k, zero());
}

// The dot products of `rows` activation rows with the sixteen full weight rows of a panel, widened
// first where several tiles meet it and it fits the stack: f(j, out) as above.
template <class T, class F>
static XPRESS_INLINE void for_each_wide_panel_row(const T* w, int64_t K, const float* const* x,
                                                  int64_t rows, const F& f) {
  if (rows <= kTileX || K > kMaxWidened) return for_each_panel_row(w, K, x, rows, K, f);
  alignas(64) float panel[kPanel * kMaxWidened];
  widen_panel(w, K, kPanel, K, panel);
  for_each_panel_row(static_cast<const float*>(panel), K, x, rows, K, f);
}

// Activation rows, rounded to the weight type T and held as fp32.
template <class T, class S>
static XPRESS_INLINE void round_row(const S* source, int64_t K, float* out) {
  for (int64_t k = 0; k < K; k += kLanes) store(out + k, round_to(load(source + k), T{}));
}

// f(pointer of the given element type)
template <class F>
static XPRESS_INLINE void with_type(DType dtype, const void* data, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<const float*>(data));
    case DType::kBFloat16:
      return f(static_cast<const bf16*>(data));
    case DType::kFloat16:
      return f(static_cast<const fp16*>(data));
  }
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
