// One panel of the readout, as readout_argmax and refined_logits share it.
#pragma once

#include "operators.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

constexpr int64_t kChunk = 32 * kPanel;     // vocabulary ids a thread takes at a time
constexpr int64_t kRowTile = 128;           // activation rows that meet a panel one after another
constexpr int64_t kWidenFrom = kTileX + 1;  // rows from which a widened panel is used twice

// s + W_r z of ids [id, id + count), count <= 16, for `rows` rows whose z and base logits are
// given: f(j, logits) with the lanes past count at -infinity.
template <class T, class S, class F>
static XPRESS_INLINE void logits_of_panel(const T* w, int64_t r, int64_t id, int64_t count,
                                          const float* const* z, const void* const* base,
                                          int64_t rows, const S*, const Ahead& ahead, const F& f) {
  auto add_base = [&](int64_t j, const float* dots) {
    const S* s = static_cast<const S*>(base[j]) + id;
    if (__builtin_expect(count == kPanel, 1)) {
      prefetch(s + kPanel);
      return f(j, add(load(s), load(dots)));
    }
    float logits[kPanel];
    for (int64_t i = 0; i < kPanel; ++i) {
      logits[i] = i < count ? to_float(s[i]) + dots[i] : -__builtin_inff();
    }
    f(j, load(logits));
  };
  if (count == kPanel && rows < kWidenFrom) {
    return for_each_panel_row(w, r, z, rows, r, add_base, ahead);
  }
  alignas(64) float panel[kPanel * kMaxRank];
  widen_panel(w, r, count, r, panel);
  for_each_panel_row(static_cast<const float*>(panel), r, z, rows, r, add_base, ahead);
}

// What follows panel [id, id + 16) of the readout in memory, to be fetched during `rows` rows.
template <class T>
static XPRESS_INLINE Ahead after_panel(const T* readout, int64_t V, int64_t r, int64_t id,
                                       int64_t rows) {
  const int64_t next_rows = min64(kPanel, V - id - kPanel);
  if (next_rows <= 0) return {};
  return Ahead::of(readout + (id + kPanel) * r, next_rows * r * sizeof(T), rows);
}

// The rows of z, widened, in groups that fit the scratch: f(first row, rows, z, base).
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
      with_type(z.dtype, z.row(n, d), [&](auto* source) { widen_row(source, r, widened + i * r); });
      z_rows[i] = widened + i * r;
      base_rows[i] = base.row(n, d);
    }
    f(row0, count, z_rows, base_rows);
  }
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
