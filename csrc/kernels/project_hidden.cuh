// project_hidden: out[n, k] = A_h h[n, k] + A_g g[n], with g[n] the mean of h[n, k] over all slots.
//
// Two launches. The first rounds h and its fp32 mean to the weight type, into scratch, whatever
// type, strides and alignment h came in, so that the second can load whole fragments.
//
// The second is a skinny product: few rows, H long, r short. A CTA takes some columns of A_h and of
// A_g and a group of whole blocks, and multiplies all slots of the group by A_h and its means, one
// row per block, by A_g, so that each weight is loaded once per group. Eight warps split H between
// them, step by step in turn, and each loads fragments straight from global memory into registers:
// no weight is used twice within a warp. (The smaller tiles have sixteen warps, half of them for
// the means, so that more loads are in flight.) The eight sums are added in shared memory in the
// order of the warps, and then the part of the mean. That order depends on nothing but H, so a
// block's bits depend neither on the other blocks nor on the tile.
//
// Floor, Qwen3-8B head, N=1: 4.2 MB of weights and 131 KB of h, 1.0 us at 4.3 TB/s. The rounded
// rows are read once per 8 columns, from L2: 4.5 MB.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "kernels/products.cuh"
#include "xpress/params.h"

namespace xpress::kernels {

template <class T>
struct RoundHidden {
  static constexpr int kThreads = 64;

  struct Params {
    int64_t blocks, B, H;
    StridedRows hidden;  // [blocks, B, H]
    T* rows;             // [blocks, B, H]
    T* means;            // [blocks, H]
  };
};

// Column h of block n, whose hidden states are of type S.
template <class T, class S>
XPRESS_DEVICE void round_column(const typename RoundHidden<T>::Params& p, int64_t n, int64_t h) {
  using namespace device;
  const S* hidden = static_cast<const S*>(p.hidden.data) + n * p.hidden.stride0 + h;
  T* rows = p.rows + n * p.B * p.H + h;
  constexpr int kAhead = 8;  // loads in flight
  float sum = 0.0f;
  for (int64_t first = 0; first < p.B; first += kAhead) {
    S values[kAhead];
    XPRESS_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < p.B) values[i] = load_global(hidden + (first + i) * p.hidden.stride1);
    }
    XPRESS_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= p.B) break;
      const float value = to_float(values[i]);
      store_global(rows + (first + i) * p.H, round_to<T>(value));
      sum += value;
    }
  }
  store_global(p.means + n * p.H + h, round_to<T>(sum / static_cast<float>(p.B)));
}

// One thread per column of a block.
template <class T>
XPRESS_KERNEL(RoundHidden<T>::kThreads)
round_hidden_kernel(typename RoundHidden<T>::Params p) {
  const int64_t thread = device::cta_index() * device::thread_count() + device::thread_index();
  const int64_t n = thread / p.H, h = thread % p.H;
  if (n >= p.blocks) return;
  switch (p.hidden.dtype) {
    case DType::kBFloat16:
      return round_column<T, bf16>(p, n, h);
    case DType::kFloat16:
      return round_column<T, fp16>(p, n, h);
    default:
      return round_column<T, float>(p, n, h);
  }
}

// kRowTiles tiles of 16 slots, one tile of 16 means and kColumnTiles tiles of 8 columns per CTA.
template <class T, int kRowTiles, int kColumnTiles>
struct ProjectHidden {
  static constexpr int kSlices = 8;  // of H, one per warp
  static constexpr bool kMeansHaveWarps = kColumnTiles == 1;
  static constexpr int kThreads = 32 * kSlices * (kMeansHaveWarps ? 2 : 1);
  static constexpr int kColumns = kProductColumns * kColumnTiles;
  static constexpr int kSlots = kProductRows * kRowTiles;
  static constexpr int kMeans = kProductRows;

  struct Params {
    int64_t blocks, r;
    int B, H;
    int group;             // blocks of a CTA: at most kMeans, with at most kSlots slots
    const T* rows;         // [blocks, B, H]
    const T* means;        // [blocks, H]
    const T* hidden_proj;  // [2, r, H]
    float* out;            // [blocks, B, r]
  };

  struct Shared {
    float slots[kSlices][kSlots][kColumns];  // each slice's part of A_h h
    float means[kSlices][kMeans][kColumns];  // and of A_g g
  };
};

// Slice `slice` of the product of rows [count, H] and of weights [8 * kColumnTiles, H], to
// part [16 * kRowTiles, 8 * kColumnTiles] in shared memory.
template <class T, int kRowTiles, int kColumnTiles>
XPRESS_DEVICE void multiply_slice(const T* rows, int count, const T* weights, int H, int slices,
                                  int slice, float* part) {
  using Held = HeldRows<T, GuardedRows<T>>;
  // Steps whose loads are in flight together, as registers allow.
  constexpr int kSteps = sizeof(T) == 4 || kColumnTiles > 1 ? 1 : 4;
  float acc[kRowTiles][kColumnTiles][4] = {};
  for (int first = slice; first < H / kProductStep; first += kSteps * slices) {
    Held a[kSteps][kRowTiles], b[kSteps][kColumnTiles];
    XPRESS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int k0 = (first + step * slices) * kProductStep;
      const bool exists = k0 < H;
      XPRESS_UNROLL
      for (int column = 0; column < kColumnTiles; ++column) {
        b[step][column] =
            hold_8_rows<T>(GuardedRows<T>{weights + int64_t{kProductColumns * column} * H, H,
                                          exists ? kProductColumns : 0},
                           k0);
      }
      XPRESS_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        a[step][tile] = hold_16_rows<T>(GuardedRows<T>{rows + int64_t{kProductRows * tile} * H, H,
                                                       exists ? count - kProductRows * tile : 0},
                                        k0);
      }
    }
    device::warp_sync();  // or the compiler would put products before the last loads
    XPRESS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int k0 = (first + step * slices) * kProductStep;
      if (k0 >= H) break;
      XPRESS_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        XPRESS_UNROLL
        for (int column = 0; column < kColumnTiles; ++column) {
          product_step<T>(acc[tile][column], a[step][tile], b[step][column], k0);
        }
      }
    }
  }
  XPRESS_UNROLL
  for (int tile = 0; tile < kRowTiles; ++tile) {
    XPRESS_UNROLL
    for (int column = 0; column < kColumnTiles; ++column) {
      for_each_element(acc[tile][column], [&](int i, int j, float value) {
        part[(kProductRows * tile + i) * kProductColumns * kColumnTiles + kProductColumns * column +
             j] = value;
      });
    }
  }
}

// The sum of all slices' parts of one element; `part` is the first, `stride` leads to the next.
template <int kSlices>
XPRESS_DEVICE float sum_of_slices(const float* part, int stride) {
  float sum = part[0];
  XPRESS_UNROLL
  for (int slice = 1; slice < kSlices; ++slice) sum += part[slice * stride];
  return sum;
}

template <class T, int kRowTiles, int kColumnTiles>
XPRESS_KERNEL((ProjectHidden<T, kRowTiles, kColumnTiles>::kThreads))
project_hidden_kernel(typename ProjectHidden<T, kRowTiles, kColumnTiles>::Params p) {
  using namespace device;
  using Kernel = ProjectHidden<T, kRowTiles, kColumnTiles>;
  constexpr int kSlices = Kernel::kSlices, kColumns = Kernel::kColumns;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  const int64_t column_groups = p.r / kColumns;
  const int64_t n0 = cta_index() / column_groups * p.group;
  const int64_t column0 = cta_index() % column_groups * kColumns;
  const int blocks = static_cast<int>(p.blocks - n0 < p.group ? p.blocks - n0 : p.group);
  const int slots = blocks * p.B;
  const int slice = warp_index() % kSlices;

  if (!Kernel::kMeansHaveWarps || warp_index() < kSlices) {
    multiply_slice<T, kRowTiles, kColumnTiles>(p.rows + n0 * p.B * p.H, slots,
                                               p.hidden_proj + column0 * p.H, p.H, kSlices, slice,
                                               &shared.slots[slice][0][0]);
  }
  if (!Kernel::kMeansHaveWarps || warp_index() >= kSlices) {
    multiply_slice<T, 1, kColumnTiles>(p.means + n0 * p.H, blocks,
                                       p.hidden_proj + (p.r + column0) * p.H, p.H, kSlices, slice,
                                       &shared.means[slice][0][0]);
  }
  cta_sync();
  for (int i = thread_index(); i < slots * kColumns; i += thread_count()) {
    const int slot = i / kColumns, column = i % kColumns;
    const float of_slot =
        sum_of_slices<kSlices>(&shared.slots[0][slot][column], Kernel::kSlots * kColumns);
    const float of_mean =
        sum_of_slices<kSlices>(&shared.means[0][slot / p.B][column], Kernel::kMeans * kColumns);
    store_global(p.out + (n0 * p.B + slot) * p.r + column0 + column, of_slot + of_mean);
  }
}

}  // namespace xpress::kernels
