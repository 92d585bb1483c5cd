// readout_argmax: argmax of s + W_r z, over the whole vocabulary or over candidates.
//
// The full readout walks the vocabulary in chunks; a thread takes a chunk, widens one panel of 16
// rows of W_r at a time into its first-level cache and multiplies it with every activation row, so
// W_r is read once however many rows there are, and no [rows, V] tensor is ever written: a panel's
// sixteen logits of a row are compared with the best so far while still in registers.
//
// Bound: rows * V * r fused multiply-adds (compute) for a block or more, bytes of W_r for the last
// unsettled slots. Candidates: C scattered rows of W_r per activation row.
#include "operators.h"
#include "parallel.h"
#include "readout.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

constexpr int64_t kRowTile = 128;  // activation rows that keep their running best in cache

// The greatest key of one row so far, and the logit that a later id must exceed to matter.
struct Best {
  uint64_t key;
  float threshold;
};

// Logits of ids beyond `id` that could beat `key`: greater ones, and equal ones of a lower id.
Best best_from(uint64_t key, int64_t next_id) {
  if (key == 0) return {0, __builtin_nanf("")};
  const float logit = key_logit(key);
  if (logit != logit) return {key, key_id(key) < next_id ? __builtin_inff() : __builtin_nanf("")};
  if (key_id(key) < next_id) return {key, logit};
  return {key, __builtin_nextafterf(logit, -__builtin_inff())};
}

XPRESS_INLINE void offer(Best* best, const float* logits, uint32_t mask, int64_t id) {
  for (; mask != 0; mask &= mask - 1) {
    const int i = __builtin_ctz(mask);
    const uint64_t key = argmax_key(logits[i], id + i);
    if (key > best->key) *best = best_from(key, id + i + 1);
  }
}

void raise_to(uint64_t* shared, uint64_t key) {
  uint64_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
  while (seen < key && !__atomic_compare_exchange_n(shared, &seen, key, true, __ATOMIC_RELAXED,
                                                    __ATOMIC_RELAXED)) {
  }
}

template <class T, class S>
void argmax_chunk(const ReadoutRows& p, const T* readout, const S* type, int64_t begin,
                  uint64_t* keys) {
  const int64_t end = min64(begin + kChunk, p.V);
  for (int64_t row0 = 0; row0 < p.rows; row0 += kRowTile) {
    const int64_t rows = min64(kRowTile, p.rows - row0);
    Best best[kRowTile];
    for (int64_t j = 0; j < rows; ++j) {
      best[j] = best_from(__atomic_load_n(keys + row0 + j, __ATOMIC_RELAXED), begin);
    }
    for_each_panel(p, readout, type, row0, rows, begin, end,
                   [&](int64_t row, F16 logits, int64_t id, int64_t count) {
                     Best* b = best + (row - row0);
                     uint32_t mask = mask_not_le(logits, set1(b->threshold));
                     if (__builtin_expect(mask == 0, 1)) return;
                     float lanes[kPanel];
                     store(lanes, logits);
                     offer(b, lanes, mask & ((1u << count) - 1u), id);
                   });
    for (int64_t j = 0; j < rows; ++j) raise_to(keys + row0 + j, best[j].key);
  }
}

}  // namespace

void readout_full(const ReadoutRows& p, uint64_t* keys) {
  for (int64_t i = 0; i < p.rows; ++i) keys[i] = 0;
  if (p.rows == 0) return;
  with_type(p.weight_dtype, p.readout, [&](auto* readout) {
    with_type(p.base_dtype, nullptr, [&](auto* type) {
      parallel_items(ceil_div(p.V, kChunk),
                     [&](int64_t chunk) { argmax_chunk(p, readout, type, chunk * kChunk, keys); });
    });
  });
}

// The argmax over one row's candidates. Four rows of W_r at a time, the next four on their way.
template <class T, class Id>
uint64_t best_candidate(const float* z, int64_t r, const T* readout, const Id* ids,
                        const float* base, int64_t count) {
  uint64_t best = 0;
  alignas(64) float dots[kPanel];
  for (int64_t i = 0; i < count; i += 4) {
    const T* rows[4];
    for (int64_t j = 0; j < 4; ++j) rows[j] = readout + ids[min64(i + j, count - 1)] * r;
    for (int64_t j = i + 4; j < min64(i + 8, count); ++j) {
      const char* next = reinterpret_cast<const char*>(readout + ids[j] * r);
      for (int64_t byte = 0; byte < r * static_cast<int64_t>(sizeof(T)); byte += 64) {
        prefetch(next + byte);
      }
    }
    dot_4_rows<1>(rows, &z, r, dots, 0);
    for (int64_t j = 0; j < min64(4, count - i); ++j) {
      const uint64_t key = argmax_key(base[i + j] + dots[4 * j], ids[i + j]);
      if (key > best) best = key;
    }
  }
  return best;
}

template uint64_t best_candidate(const float*, int64_t, const float*, const int32_t*, const float*,
                                 int64_t);
template uint64_t best_candidate(const float*, int64_t, const bf16*, const int32_t*, const float*,
                                 int64_t);
template uint64_t best_candidate(const float*, int64_t, const fp16*, const int32_t*, const float*,
                                 int64_t);

namespace {

void argmax_of_candidates(const ReadoutArgmaxParams& p, int64_t row0, int64_t count,
                          const float* const* z_rows, const void* const* base_rows,
                          uint64_t* keys) {
  with_type(p.weight_dtype, p.readout, [&](auto* readout) {
    with_type(p.base_logits.dtype, nullptr, [&](auto* type) {
      parallel_items(count, [&](int64_t i) {
        const int64_t* ids = p.candidates + (row0 + i) * p.C;
        const auto* base = static_cast<decltype(type)>(base_rows[i]);
        uint64_t best = 0;
        for (int64_t c0 = 0; c0 < p.C; c0 += kPanel) {
          const int64_t width = min64(kPanel, p.C - c0);
          int32_t panel_ids[kPanel];
          float panel_base[kPanel];
          for (int64_t c = 0; c < width; ++c) {
            panel_ids[c] = static_cast<int32_t>(ids[c0 + c]);
            panel_base[c] = to_float(base[ids[c0 + c]]);
          }
          const uint64_t key =
              best_candidate(z_rows[i], p.r, readout, panel_ids, panel_base, width);
          if (key > best) best = key;
        }
        keys[i] = best;
      });
    });
  });
}

}  // namespace

void readout_argmax(const ReadoutArgmaxParams& p, void* scratch) {
  uint64_t keys[kReadoutRows];
  for_each_z_group(
      p.z, p.D, p.N * p.D, p.r, p.base_logits, scratch,
      [&](int64_t row0, int64_t count, const float* const* z, const void* const* base) {
        if (p.candidates != nullptr) {
          argmax_of_candidates(p, row0, count, z, base, keys);
        } else {
          readout_full(
              ReadoutRows{count, p.V, p.r, z, base, p.base_logits.dtype, p.readout, p.weight_dtype},
              keys);
        }
        for (int64_t i = 0; i < count; ++i) {
          p.index[row0 + i] = key_id(keys[i]);
          p.value[row0 + i] = key_logit(keys[i]);
        }
      });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
