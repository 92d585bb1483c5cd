// The walk over panels of the readout that readout_argmax and refined_logits share.
#pragma once

#include "operators.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

constexpr int64_t kChunk = 32 * kPanel;     // vocabulary ids a thread takes at a time
constexpr int64_t kWidenFrom = kTileX + 1;  // rows from which a widened panel is used twice

// Calls f(row, logits, id, count) with s + W_r z of ids [id, id + count) for every row of a tile
// and every panel of [begin, end).
template <class T, class S, class F>
static XPRESS_INLINE void for_each_panel(const ReadoutRows& p, const T* readout, const S*,
                                         int64_t row0, int64_t rows, int64_t begin, int64_t end,
                                         const F& f) {
  alignas(64) float panel[kPanel * kMaxRank];
  for (int64_t id = begin; id < end; id += kPanel) {
    const int64_t count = min64(kPanel, end - id);
    const T* w = readout + id * p.r;
    auto add_base = [&](int64_t j, const float* dots) {
      const S* base = static_cast<const S*>(p.base[row0 + j]) + id;
      if (__builtin_expect(count == kPanel, 1)) {
        prefetch(base + kPanel);
        f(row0 + j, add(load(base), load(dots)), id, count);
      } else {
        float logits[kPanel];
        for (int64_t i = 0; i < kPanel; ++i) {
          logits[i] = i < count ? to_float(base[i]) + dots[i] : -__builtin_inff();
        }
        f(row0 + j, load(logits), id, count);
      }
    };
    if (count == kPanel && rows < kWidenFrom) {
      for_each_panel_row(w, p.r, p.z + row0, rows, p.r, add_base);
    } else {
      widen_panel(w, p.r, count, p.r, panel);
      for_each_panel_row(panel, p.r, p.z + row0, rows, p.r, add_base);
    }
  }
}

// Rows of z, widened, in groups that fit the scratch.
template <class F>
static void for_each_z_group(const StridedRows& z, int64_t rows_per_block, int64_t rows, int64_t r,
                             const StridedRows& base, void* scratch, const F& f) {
  float* widened = static_cast<float*>(scratch);
  const float* z_rows[kReadoutRows];
  const void* base_rows[kReadoutRows];
  for (int64_t row0 = 0; row0 < rows; row0 += kReadoutRows) {
    const int64_t count = min64(kReadoutRows, rows - row0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = (row0 + i) / rows_per_block, d = (row0 + i) % rows_per_block;
      with_type(z.dtype, z.row(n, d), [&](auto* source) {
        for (int64_t c = 0; c < r; c += kLanes) store(widened + i * r + c, load(source + c));
      });
      z_rows[i] = widened + i * r;
      base_rows[i] = base.row(n, d);
    }
    f(row0, count, z_rows, base_rows);
  }
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
