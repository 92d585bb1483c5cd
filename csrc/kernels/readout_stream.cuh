// readout_argmax for up to 16 rows, weights of 16 bits: the best of base + W_r z over the whole
// vocabulary.
//
// Bound by the bytes of W_r: V * r * 2, 77.8 MB for Qwen3-8B's head, 16.2 us at 4.8 TB/s; the base
// logits of 15 rows are 4.6 MB more. So everything serves one stream: the grid is as large as the
// GPU holds at once and every warp walks the vocabulary in strides of the grid, W_r going straight
// from memory into tensor-core fragments, 16 bytes a lane, each byte loaded once. The rows of z are
// the 16 rows of the product and wait in shared memory. A warp takes 16 ids at a time and loads 128
// k of them before it multiplies: 4 KB in flight a warp, 64 KB an SM with 16 warps, above what
// latency times bandwidth asks for (40 KB).
//
// Nothing but the best key of a row leaves a lane's registers; at the end of its walk a warp
// combines them, a CTA its warps', and one atomic maximum per row and CTA joins the CTAs.
#pragma once

#include "kernels/readout.cuh"

namespace xpress::kernels {

template <class T>
struct ReadoutStream {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPanels = 2;  // of 8 ids, that a warp multiplies at once
  static constexpr int kSteps = 4;   // of 32 k, that it loads at once
  static constexpr int kIds = kProductColumns * kPanels;

  struct Params {
    ReadoutRows rows;  // N * D <= 16
    int64_t V;
    int r;
    const T* readout;  // [V, r]
    uint64_t* keys;    // [N * D]
  };

  struct Shared {
    uint64_t best[kWarps][kProductRows];
    int64_t rows[kProductRows];
    int64_t scratch[kWarps];
    // then z [16, padded_stride(r)]
  };
};

// The logits of 16 rows and kIds ids from `id` on, without base: acc[panel] as in products.cuh.
template <class T>
XPRESS_DEVICE void stream_products(const SharedRows<T>& z, const T* readout, int64_t V, int r,
                                   int64_t id, float (&acc)[ReadoutStream<T>::kPanels][4]) {
  using namespace device;
  constexpr int kPanels = ReadoutStream<T>::kPanels, kSteps = ReadoutStream<T>::kSteps;
  const int g = lane_index() / 4, t = lane_index() % 4;
  for (int k0 = 0; k0 < r; k0 += kSteps * kProductStep) {
    Bytes16 weights[kPanels][kSteps];
    XPRESS_UNROLL
    for (int panel = 0; panel < kPanels; ++panel) {
      const int64_t row = id + panel * kProductColumns + g;
      XPRESS_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        const int k = k0 + step * kProductStep;
        weights[panel][step] = load_global_or_zero(readout + row * r + k + 8 * t, row < V && k < r);
      }
    }
    XPRESS_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const int k = k0 + step * kProductStep;
      if (k >= r) break;
      const Bytes16 low = z(g, k + 8 * t), high = z(g + 8, k + 8 * t);
      XPRESS_UNROLL
      for (int panel = 0; panel < kPanels; ++panel) {
        mma_step<T>(acc[panel], low, high, weights[panel][step]);
      }
    }
  }
}

template <class T>
XPRESS_KERNEL(ReadoutStream<T>::kThreads)
readout_stream_kernel(typename ReadoutStream<T>::Params p) {
  using namespace device;
  using Kernel = ReadoutStream<T>;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory());
  T* z = reinterpret_cast<T*>(shared_memory() + sizeof(typename Kernel::Shared));
  const int stride = padded_stride<T>(p.r);
  const int count =
      static_cast<int>(find_rows(p.rows, /*first=*/0, kProductRows, shared.rows, shared.scratch));
  if (count == 0) return;
  copy_latents<T>(p.rows.z, p.rows.D, shared.rows, count, kProductRows, p.r,
                  [&](int row, int k) { return z + row * stride + k; });
  cta_sync();

  const int g = lane_index() / 4, t = lane_index() % 4;
  uint64_t best_low = 0, best_high = 0;  // of rows g and g + 8
  with_type(p.rows.base_logits.dtype, [&](auto* type) {
    using Base = std::remove_pointer_t<decltype(type)>;
    const bool has_low = g < count, has_high = g + 8 < count;
    const Base* base_low = row_of<Base>(p.rows.base_logits, shared.rows[has_low ? g : 0], p.rows.D);
    const Base* base_high =
        row_of<Base>(p.rows.base_logits, shared.rows[has_high ? g + 8 : 0], p.rows.D);
    const int64_t stride_ids = cta_count() * Kernel::kWarps * Kernel::kIds;
    for (int64_t id0 = (cta_index() * Kernel::kWarps + warp_index()) * Kernel::kIds; id0 < p.V;
         id0 += stride_ids) {
      // Asked for first, needed last.
      float low[Kernel::kPanels][2], high[Kernel::kPanels][2];
      XPRESS_UNROLL
      for (int i = 0; i < 2 * Kernel::kPanels; ++i) {
        const int64_t id = id0 + i / 2 * kProductColumns + 2 * t + i % 2;
        low[i / 2][i % 2] = has_low && id < p.V ? to_float(load_global(base_low + id)) : 0.0f;
        high[i / 2][i % 2] = has_high && id < p.V ? to_float(load_global(base_high + id)) : 0.0f;
      }
      float acc[Kernel::kPanels][4] = {};
      stream_products(SharedRows<T>{z, stride}, p.readout, p.V, p.r, id0, acc);
      XPRESS_UNROLL
      for (int i = 0; i < 2 * Kernel::kPanels; ++i) {
        const int64_t id = id0 + i / 2 * kProductColumns + 2 * t + i % 2;
        if (id >= p.V) continue;
        best_low = max(best_low, argmax_key(low[i / 2][i % 2] + acc[i / 2][i % 2], id));
        best_high = max(best_high, argmax_key(high[i / 2][i % 2] + acc[i / 2][2 + i % 2], id));
      }
    }
  });
  best_low = row_max(best_low);
  best_high = row_max(best_high);
  if (t == 0) {
    shared.best[warp_index()][g] = best_low;
    shared.best[warp_index()][g + 8] = best_high;
  }
  cta_sync();
  if (thread_index() < count) {
    uint64_t best = 0;
    for (int w = 0; w < Kernel::kWarps; ++w) best = max(best, shared.best[w][thread_index()]);
    if (best != 0) atomic_max(p.keys + shared.rows[thread_index()], best);
  }
}

}  // namespace xpress::kernels
