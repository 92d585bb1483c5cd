// What the kernels of the readout share: which rows they score, where a row's base logits lie, and
// how the best logit of a row is kept.
//
// A row is one drafted slot, n * D + d for slot d + 1 of block n. In the Jacobi loop the settled
// slots of a block are those up to `settled[n]`, so the rows still to be scored are a suffix of
// each block; they are numbered in order, and a tile takes consecutive ones. Where none is left a
// kernel returns at once.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "device/warp.h"
#include "kernels/products.cuh"
#include "xpress/params.h"

namespace xpress::kernels {

struct ReadoutRows {
  int64_t N, D;
  StridedRows z;            // [N, D, r]
  StridedRows base_logits;  // [N, D, V]
  const int32_t* settled;   // [N], or null: every row is scored
};

// Finds the rows that a tile scores: those numbered first ... first + capacity - 1 of the unsettled
// ones. Writes them to rows [capacity] and returns how many unsettled ones there are in all. Both
// `rows` and `scratch` (one word per warp) are in shared memory; all threads of the CTA call this.
XPRESS_DEVICE int64_t find_rows(const ReadoutRows& p, int64_t first, int capacity, int64_t* rows,
                                int64_t* scratch) {
  using namespace device;
  if (p.settled == nullptr) {
    const int64_t total = p.N * p.D;
    for (int i = thread_index(); i < capacity; i += thread_count()) rows[i] = first + i;
    cta_sync();
    return total;
  }
  int64_t total = 0;  // unsettled rows of the blocks before this round's
  for (int64_t n0 = 0; n0 < p.N; n0 += thread_count()) {
    const int64_t n = n0 + thread_index();
    const int64_t settled = n < p.N ? load_global(p.settled + n) : p.D;
    const int64_t count = p.D - settled;
    // Sums over the lanes before this one, then over the warps before this one.
    int64_t before = 0, sum = count;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int64_t other = shuffle(sum, lane_index() - distance);
      if (lane_index() >= distance) sum += other;
    }
    before = sum - count;
    if (lane_index() == kWarpSize - 1) scratch[warp_index()] = sum;
    cta_sync();
    int64_t round_total = 0;
    for (int w = 0; w < warp_count(); ++w) {
      if (w == warp_index()) before += round_total;
      round_total += scratch[w];
    }
    const int64_t place = total + before - first;  // in the tile, of this block's first row
    for (int64_t i = 0; i < count; ++i) {
      if (place + i >= 0 && place + i < capacity) rows[place + i] = n * p.D + settled + i;
    }
    total += round_total;
    cta_sync();
  }
  return total;
}

// The first element of a row of z or of the base logits.
template <class T>
XPRESS_DEVICE const T* row_of(const StridedRows& rows, int64_t row, int64_t D) {
  return static_cast<const T*>(rows.data) + row / D * rows.stride0 + row % D * rows.stride1;
}

// Calls visit with a null pointer of the type that `dtype` names.
template <class Visit>
XPRESS_DEVICE void with_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(static_cast<const bf16*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<const fp16*>(nullptr));
    default:
      return visit(static_cast<const float*>(nullptr));
  }
}

// Copies rows of z to where place(row, k) says, zeros where `rows` has fewer than `capacity`.
template <class T, class Place>
XPRESS_DEVICE void copy_latents(const StridedRows& z, int64_t D, const int64_t* rows, int count,
                                int capacity, int r, const Place& place) {
  // z has any alignment that its type has, so element by element.
  for (int i = device::thread_index(); i < capacity * r; i += device::thread_count()) {
    const int row = i / r, k = i % r;
    *place(row, k) = row < count ? device::load_global(row_of<T>(z, rows[row], D) + k)
                                 : device::round_to<T>(0.0f);
  }
}

// The greater of the keys that the four lanes of a row (the same lane / 4) hold, in all of them.
XPRESS_DEVICE uint64_t row_max(uint64_t key) {
  key = device::max(key, device::shuffle_xor(key, 1));
  return device::max(key, device::shuffle_xor(key, 2));
}

}  // namespace xpress::kernels
