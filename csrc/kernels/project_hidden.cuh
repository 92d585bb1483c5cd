// project_hidden: out[n, k] = A_h h[n, k] + A_g g[n], with g[n] the mean of h[n, k] over all slots.
//
// Two launches. The first rounds h and its fp32 mean to the weight type, into scratch, whatever
// type, strides and alignment h came in, so that the second can load whole fragments.
//
// The second is a skinny product: few rows, H long, r short. A CTA takes some columns of A_h and of
// A_g and a group of whole blocks, and multiplies all slots of the group by A_h and its means, one
// row per block, by A_g, so that each weight is loaded once per group. Its eight warps split H
// between them, step by step in turn, and each loads fragments straight from global memory into
// registers: no weight is used twice within a warp. The eight sums are added in shared memory in
// the order of the warps, and then the part of the mean. That order depends on nothing but H, so a
// block's bits depend neither on the other blocks nor on the tile.
//
// Floor, Qwen3-8B head, N=1: 4.2 MB of weights and 131 KB of h, 1.0 us at 4.3 TB/s. The smaller
// tile reads the rounded rows once per 8 columns, from L2: 4.5 MB.
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
  float sum = 0.0f;
  XPRESS_UNROLL_BY(8)
  for (int64_t k = 0; k < p.B; ++k) {
    const float value = to_float(load_global(hidden + k * p.hidden.stride1));
    store_global(rows + k * p.H, round_to<T>(value));
    sum += value;
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
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumns = kProductColumns * kColumnTiles;
  static constexpr int kSlots = kProductRows * kRowTiles;
  static constexpr int kMeans = kProductRows;
  // Steps of k in flight, as registers allow.
  static constexpr int kSteps = sizeof(T) == 2 && kColumnTiles == 1 ? 4 : 1;

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
    float slots[kWarps][kSlots][kColumns];  // each warp's part of A_h h
    float means[kWarps][kMeans][kColumns];  // and of A_g g
  };
};

// The sum of the warps' parts of one element; `part` is the first, `stride` leads to the next.
template <int kWarps>
XPRESS_DEVICE float sum_of_warps(const float* part, int stride) {
  float sum = part[0];
  XPRESS_UNROLL
  for (int w = 1; w < kWarps; ++w) sum += part[w * stride];
  return sum;
}

template <class T, int kRowTiles, int kColumnTiles>
XPRESS_KERNEL(256)
project_hidden_kernel(typename ProjectHidden<T, kRowTiles, kColumnTiles>::Params p) {
  using namespace device;
  using Kernel = ProjectHidden<T, kRowTiles, kColumnTiles>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  const int64_t column_groups = p.r / Kernel::kColumns;
  const int64_t n0 = cta_index() / column_groups * p.group;
  const int64_t column0 = cta_index() % column_groups * Kernel::kColumns;
  const int blocks = static_cast<int>(p.blocks - n0 < p.group ? p.blocks - n0 : p.group);
  const int slots = blocks * p.B;
  const T* rows = p.rows + n0 * p.B * p.H;
  const T* a_h = p.hidden_proj + column0 * p.H;
  const T* a_g = a_h + p.r * p.H;
  const GuardedRows<T> means{p.means + n0 * p.H, p.H, blocks};

  float slot_part[kRowTiles][kColumnTiles][4] = {};
  float mean_part[kColumnTiles][4] = {};
  XPRESS_UNROLL_BY(Kernel::kSteps)
  for (int k0 = warp_index() * kProductStep; k0 < p.H; k0 += Kernel::kWarps * kProductStep) {
    XPRESS_UNROLL
    for (int column = 0; column < kColumnTiles; ++column) {
      const GlobalRows<T> h_weights{a_h + int64_t{kProductColumns * column} * p.H, p.H};
      const GlobalRows<T> g_weights{a_g + int64_t{kProductColumns * column} * p.H, p.H};
      product_step<T>(mean_part[column], means, g_weights, k0);
      XPRESS_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const GuardedRows<T> tile_rows{rows + int64_t{kProductRows * tile} * p.H, p.H,
                                       slots - kProductRows * tile};
        product_step<T>(slot_part[tile][column], tile_rows, h_weights, k0);
      }
    }
  }
  XPRESS_UNROLL
  for (int column = 0; column < kColumnTiles; ++column) {
    for_each_element(mean_part[column], [&](int i, int j, float value) {
      shared.means[warp_index()][i][kProductColumns * column + j] = value;
    });
    XPRESS_UNROLL
    for (int tile = 0; tile < kRowTiles; ++tile) {
      for_each_element(slot_part[tile][column], [&](int i, int j, float value) {
        shared.slots[warp_index()][kProductRows * tile + i][kProductColumns * column + j] = value;
      });
    }
  }
  cta_sync();
  for (int i = thread_index(); i < slots * Kernel::kColumns; i += thread_count()) {
    const int slot = i / Kernel::kColumns, column = i % Kernel::kColumns;
    const float of_slot = sum_of_warps<Kernel::kWarps>(&shared.slots[0][slot][column],
                                                       Kernel::kSlots * Kernel::kColumns);
    const float of_mean = sum_of_warps<Kernel::kWarps>(&shared.means[0][slot / p.B][column],
                                                       Kernel::kMeans * Kernel::kColumns);
    store_global(p.out + (n0 * p.B + slot) * p.r + column0 + column, of_slot + of_mean);
  }
}

}  // namespace xpress::kernels
