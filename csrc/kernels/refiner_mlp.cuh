// refiner_mlp: z = c + W_down( silu(W_gate c) * (W_up c) ), SwiGLU with a residual.
//
// Two products, r -> 2m and m -> r, each a launch of its own: the second needs the whole hidden
// layer of a row, and the first is split over all SMs by the columns of the hidden layer, so that
// the weights, which are most of the bytes when there are few rows, are read by many SMs at once.
// The hidden layer lies in scratch between the two, rounded to the weight type. No sum is split: an
// element of either product is one chain over k (products.cuh), so a row's bits depend neither on
// the other rows nor on the tile.
//
// A CTA takes a tile of up to 64 rows by 32 columns. It brings its rows of c (rounded to the weight
// type on the way) or of the hidden layer, and of the weights, into shared memory, all copies in
// flight at once, and each warp multiplies tiles of 16 by 8.
//
// Floor, Qwen3-8B head, N=1: 786 KB of weights, 16 KB of c, 8 KB of z, and 16 KB of hidden layer
// written and read: 0.19 us at 4.3 TB/s, less than the latency of the two launches. N=64: the same
// weights, 2.5 MB of rows and 0.8 GFLOP: 1 us at 790 TFLOP/s.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "kernels/products.cuh"

namespace xpress::kernels {

template <class T>
struct RefinerMlp {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMaxTiles = 16;  // products of 16 rows by 8 columns of a CTA
  static constexpr int kTilesPerWarp = kMaxTiles / kWarps;

  // What a CTA computes of either product.
  struct Tiling {
    int row_tiles;     // of 16 rows
    int column_tiles;  // of 8 columns
    int chunk;         // k brought into shared memory at a time
  };

  struct HiddenParams {
    Tiling tiling;  // chunk = r
    int64_t rows, m;
    int r;
    const float* c;        // [rows, r]
    const T* mlp_gate_up;  // [2m, r]
    T* hidden;             // [rows, m]
  };

  struct DownParams {
    Tiling tiling;
    int64_t rows, r;
    int m;
    const float* c;     // [rows, r]
    const T* hidden;    // [rows, m]
    const T* mlp_down;  // [r, m]
    T* out;             // [rows, r]
  };
};

// The hidden layer of 16 rows of rounded c and 8 columns, from the rows of W_gate and W_up that
// belong to these columns: emit(row, column, value) once per element, by the lane that owns it.
// All lanes of a warp call this.
template <class T, class Rows, class WeightRows, class Emit>
XPRESS_DEVICE void mlp_hidden_tile(const Rows& c, const WeightRows& gate_rows,
                                   const WeightRows& up_rows, int r, const Emit& emit) {
  float sums[2][4] = {};  // gate, up
  products<T>(sums, c, {gate_rows, up_rows}, r);
  float values[4];
  XPRESS_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = device::silu(sums[0][i]) * sums[1][i];
  for_each_element(values, [&](int row, int column, float value) {
    emit(row, column, device::round_to<T>(value));
  });
}

// Starts to copy `width` elements of `count` rows into shared memory, row i from
// rows + i * row_stride, a row per warp at a time; the rows from `valid` on become zero.
template <class T>
XPRESS_DEVICE void copy_rows_async(T* shared, int stride, const T* rows, int64_t row_stride,
                                   int count, int64_t valid, int width) {
  constexpr int kElements = 16 / sizeof(T);
  for (int row = device::warp_index(); row < count; row += device::warp_count()) {
    const bool wanted = row < valid;
    const T* from = rows + (wanted ? row * row_stride : 0);
    for (int k = device::lane_index() * kElements; k < width; k += device::kWarpSize * kElements) {
      device::copy_async_16(shared + row * stride + k, from + k, wanted);
    }
  }
}

// Rounds rows [count, width] of fp32 into shared memory, a row per warp at a time; the rows from
// `valid` on become zero.
template <class T>
XPRESS_DEVICE void round_rows(T* shared, int stride, const float* rows, int count, int64_t valid,
                              int width) {
  for (int row = device::warp_index(); row < count; row += device::warp_count()) {
    const bool wanted = row < valid;
    const float* from = rows + (wanted ? int64_t{row} * width : 0);
    XPRESS_UNROLL_BY(8)
    for (int k = device::lane_index(); k < width; k += device::kWarpSize) {
      shared[row * stride + k] = device::round_to<T>(wanted ? device::load_global(from + k) : 0.0f);
    }
  }
}

template <class T>
XPRESS_KERNEL(RefinerMlp<T>::kThreads)
mlp_hidden_kernel(typename RefinerMlp<T>::HiddenParams p) {
  using namespace device;
  const int rows = kProductRows * p.tiling.row_tiles;
  const int columns = kProductColumns * p.tiling.column_tiles;
  const int64_t column_groups = p.m / columns;
  const int64_t row0 = cta_index() / column_groups * rows;
  const int64_t column0 = cta_index() % column_groups * columns;
  const int stride = padded_stride<T>(p.r);
  T* c = reinterpret_cast<T*>(shared_memory());  // [rows, stride]
  T* gate = c + rows * stride;                   // [columns, stride]
  T* up = gate + columns * stride;               // [columns, stride]

  copy_rows_async(gate, stride, p.mlp_gate_up + column0 * p.r, p.r, columns, columns, p.r);
  copy_rows_async(up, stride, p.mlp_gate_up + (p.m + column0) * p.r, p.r, columns, columns, p.r);
  copy_async_commit();
  round_rows(c, stride, p.c + row0 * p.r, rows, p.rows - row0, p.r);
  copy_async_wait<0>();
  cta_sync();

  for (int i = warp_index(); i < p.tiling.row_tiles * p.tiling.column_tiles; i += warp_count()) {
    const int tile_row = i / p.tiling.column_tiles * kProductRows;
    const int tile_column = i % p.tiling.column_tiles * kProductColumns;
    mlp_hidden_tile<T>(SharedRows<T>{c + tile_row * stride, stride},
                       SharedRows<T>{gate + tile_column * stride, stride},
                       SharedRows<T>{up + tile_column * stride, stride}, p.r,
                       [&](int row, int column, T value) {
                         const int64_t i = row0 + tile_row + row;
                         if (i >= p.rows) return;
                         store_global(p.hidden + i * p.m + column0 + tile_column + column, value);
                       });
  }
}

template <class T>
XPRESS_KERNEL(RefinerMlp<T>::kThreads)
mlp_down_kernel(typename RefinerMlp<T>::DownParams p) {
  using namespace device;
  constexpr int kTilesPerWarp = RefinerMlp<T>::kTilesPerWarp;
  const int rows = kProductRows * p.tiling.row_tiles;
  const int columns = kProductColumns * p.tiling.column_tiles;
  const int64_t column_groups = p.r / columns;
  const int64_t row0 = cta_index() / column_groups * rows;
  const int64_t column0 = cta_index() % column_groups * columns;
  const int stride = padded_stride<T>(p.tiling.chunk);
  const int tiles = p.tiling.row_tiles * p.tiling.column_tiles;
  T* hidden = reinterpret_cast<T*>(shared_memory());  // [rows, stride]
  T* down = hidden + rows * stride;                   // [columns, stride]

  float acc[kTilesPerWarp][4] = {};
  for (int k0 = 0; k0 < p.m; k0 += p.tiling.chunk) {
    const int width = p.m - k0 < p.tiling.chunk ? p.m - k0 : p.tiling.chunk;
    cta_sync();  // the last chunk is no longer read
    copy_rows_async(hidden, stride, p.hidden + row0 * p.m + k0, p.m, rows, p.rows - row0, width);
    copy_rows_async(down, stride, p.mlp_down + column0 * p.m + k0, p.m, columns, columns, width);
    copy_async_commit();
    copy_async_wait<0>();
    cta_sync();
    XPRESS_UNROLL
    for (int i = 0; i < kTilesPerWarp; ++i) {
      const int tile = warp_index() + i * warp_count();
      if (tile >= tiles) continue;
      const T* a = hidden + tile / p.tiling.column_tiles * kProductRows * stride;
      const T* b = down + tile % p.tiling.column_tiles * kProductColumns * stride;
      product<T>(acc[i], SharedRows<T>{a, stride}, SharedRows<T>{b, stride}, width);
    }
  }
  XPRESS_UNROLL
  for (int i = 0; i < kTilesPerWarp; ++i) {
    const int tile = warp_index() + i * warp_count();
    if (tile >= tiles) continue;
    const int64_t tile_row = row0 + tile / p.tiling.column_tiles * kProductRows;
    const int64_t tile_column = column0 + tile % p.tiling.column_tiles * kProductColumns;
    for_each_element(acc[i], [&](int row, int column, float value) {
      if (tile_row + row >= p.rows) return;
      const int64_t at = (tile_row + row) * p.r + tile_column + column;
      store_global(p.out + at, round_to<T>(load_global(p.c + at) + value));
    });
  }
}

}  // namespace xpress::kernels
