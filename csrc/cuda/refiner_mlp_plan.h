// Tiles and grids of refiner_mlp. No choice here changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

struct MlpProductPlan {
  int row_tiles;     // of 16 rows, per CTA
  int column_tiles;  // of 8 columns, per CTA; divides their number
  int chunk;         // k in shared memory at a time, a multiple of 32
  int64_t ctas;
  int64_t shared_bytes;
};

struct RefinerMlpPlan {
  MlpProductPlan hidden;  // rows by m columns, k = r in one chunk
  MlpProductPlan down;    // rows by r columns, k = m
};

// Shared memory of a CTA at most: what every supported GPU has, and two CTAs fit on a large one.
constexpr int64_t kMlpSharedBytes = 96 << 10;

// The largest tile that still gives every SM a CTA, since a larger tile reads less and more SMs
// read faster; a shared_bytes beyond the device's means that not even the smallest tile fits.
// `weights` is the number of weight rows per column; `one_chunk` asks for the whole `width` at
// once.
inline MlpProductPlan plan_mlp_product(int64_t rows, int64_t columns, int64_t width, int weights,
                                       int64_t element_size, bool one_chunk,
                                       const DeviceLimits& limits) {
  const auto ctas = [&](int row_tiles, int column_tiles) {
    return (rows + 16 * row_tiles - 1) / (16 * row_tiles) * (columns / (8 * column_tiles));
  };
  const auto bytes = [&](int row_tiles, int column_tiles, int64_t chunk) {
    // The stride of padded_stride() (kernels/products.cuh), at most.
    const int64_t stride_bytes = chunk * element_size + 64;
    return (16 * row_tiles + weights * 8 * column_tiles) * stride_bytes;
  };
  int row_tiles = static_cast<int>(std::clamp<int64_t>((rows + 15) / 16, 1, 4));
  int column_tiles = 4;
  while (column_tiles > 1 && ctas(row_tiles, column_tiles) < limits.num_sms) column_tiles /= 2;
  while (row_tiles > 1 && ctas(row_tiles, column_tiles) < limits.num_sms) --row_tiles;
  const int64_t budget = std::min(kMlpSharedBytes, limits.shared_bytes_per_cta);
  int64_t chunk = width;
  if (one_chunk) {
    while (row_tiles > 1 && bytes(row_tiles, column_tiles, chunk) > budget) --row_tiles;
    while (column_tiles > 1 && bytes(row_tiles, column_tiles, chunk) > budget) {
      column_tiles /= 2;
    }
  } else {
    while (chunk > 32 && bytes(row_tiles, column_tiles, chunk) > budget) chunk -= 32;
  }
  return {row_tiles, column_tiles, static_cast<int>(chunk), ctas(row_tiles, column_tiles),
          bytes(row_tiles, column_tiles, chunk)};
}

inline RefinerMlpPlan plan_refiner_mlp(int64_t rows, int64_t r, int64_t m, int64_t element_size,
                                       const DeviceLimits& limits) {
  return {plan_mlp_product(rows, m, r, /*weights=*/2, element_size, /*one_chunk=*/true, limits),
          plan_mlp_product(rows, r, m, /*weights=*/1, element_size, /*one_chunk=*/false, limits)};
}

}  // namespace xpress::cuda
