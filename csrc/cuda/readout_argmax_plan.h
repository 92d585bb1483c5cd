// Form, tiles and grid of the full readout. No choice here changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"
#include "xpress/dtype.h"

namespace xpress::cuda {

struct ReadoutPlan {
  int tile_rows;  // this and the next two: readout_tiled.cuh only
  int chunk;
  int stages;
  int64_t ctas;
  int64_t shared_bytes;
};

// Bytes of a row of `width` elements in shared memory, padded (padded_stride,
// kernels/products.cuh).
inline int64_t padded_row_bytes(int64_t width, int64_t element_size) {
  const int64_t bytes = width * element_size;
  return bytes % 128 == 0 ? bytes + 64 : bytes;
}

// Streams with two CTAs an SM: 16 warps with 4 KB in flight each.
inline ReadoutPlan plan_readout_stream(int64_t V, int64_t r, int64_t shared_struct_bytes,
                                       const DeviceLimits& limits) {
  constexpr int64_t kIdsOfCta = 8 * 16;
  const int64_t ctas = std::min<int64_t>(2 * limits.num_sms, (V + kIdsOfCta - 1) / kIdsOfCta);
  return {16, 0, 0, ctas, shared_struct_bytes + 16 * padded_row_bytes(r, 2)};
}

// The most rows that fit beside a ring of three stages; then the widest stages.
inline ReadoutPlan plan_readout_tiled(int64_t rows, int64_t V, int64_t r, int64_t element_size,
                                      int64_t shared_struct_bytes, const DeviceLimits& limits) {
  constexpr int64_t kIds = 128, kMaxRows = 128;
  const int64_t wanted = std::min(kMaxRows, (rows + 15) / 16 * 16);
  ReadoutPlan plan{};
  const auto try_sizes = [&](int64_t tile_rows, int64_t chunk, int64_t stages) {
    const int64_t bytes = shared_struct_bytes + tile_rows * padded_row_bytes(r, element_size) +
                          stages * kIds * padded_row_bytes(chunk, element_size);
    if (plan.stages != 0 || bytes > limits.shared_bytes_per_cta) return;
    plan.tile_rows = static_cast<int>(tile_rows);
    plan.chunk = static_cast<int>(chunk);
    plan.stages = static_cast<int>(stages);
    plan.shared_bytes = bytes;
  };
  for (int64_t tile_rows = wanted; tile_rows >= 16; tile_rows -= 16) {
    for (const int64_t stages : {3, 2}) {
      for (const int64_t chunk : {128, 64, 32}) try_sizes(tile_rows, std::min(chunk, r), stages);
    }
  }
  if (plan.stages == 0) return plan;  // nothing fits
  // No more tiles than that takes, but all of about the same height: each reads all of W_r, and the
  // highest sets the time.
  const int64_t row_tiles = (rows + plan.tile_rows - 1) / plan.tile_rows;
  const int64_t tile_rows = ((rows + row_tiles - 1) / row_tiles + 15) / 16 * 16;
  plan.shared_bytes -= (plan.tile_rows - tile_rows) * padded_row_bytes(r, element_size);
  plan.tile_rows = static_cast<int>(tile_rows);
  // One CTA an SM, or as many as there are tiles.
  plan.ctas = std::min<int64_t>(limits.num_sms, row_tiles * ((V + kIds - 1) / kIds));
  return plan;
}

}  // namespace xpress::cuda
