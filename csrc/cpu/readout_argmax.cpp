// readout_argmax: argmax of s + W_r z, over the whole vocabulary or over candidates.
//
// The full readout walks the vocabulary in chunks; a thread takes a chunk and meets one panel of 16
// rows of W_r at a time with every activation row, so W_r is read once however many rows there are,
// and no [rows, V] tensor is ever written.
//
// Most products are never needed. By Cauchy-Schwarz no logit of id v exceeds s[v] + |W_r[v]| |z|,
// so a panel whose sixteen bounds all fail to beat the row's best logit so far is passed over: the
// argmax, ties and NaN included, is what it would have been. The norms are computed as the panel
// streams by, which costs as much as one activation row; the best so far starts from a logit that
// is likely to be high (`hints`). Where bounds do not separate (flat base logits, large
// corrections), the rest of a chunk is computed without asking.
//
// Bound: bytes of W_r and s where bounds separate; rows * V * r fused multiply-adds where they do
// not. Candidates: C scattered rows of W_r per activation row.
#include "operators.h"
#include "parallel.h"
#include "readout.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

constexpr int64_t kProbePanels = 2;  // panels of a chunk that decide whether bounds are worth it
constexpr float kGreatestFinite = 0x1.fffffep+127f;
constexpr int64_t kStreamBytes = 32768;  // how far ahead of the norms W_r is fetched

// The greatest key of one row so far, and the logit that a later id must exceed to matter.
struct Best {
  uint64_t key;
  float threshold;
};

// Logits of ids from next_id on that could beat `key`: greater ones, and equal ones of a lower id.
Best best_from(uint64_t key, int64_t next_id) {
  if (key == 0) return {0, __builtin_nanf("")};
  const float logit = key_logit(key);
  if (logit != logit) return {key, key_id(key) < next_id ? __builtin_inff() : __builtin_nanf("")};
  if (key_id(key) < next_id) return {key, logit};
  return {key, __builtin_nextafterf(logit, -__builtin_inff())};
}

XPRESS_INLINE void offer(Best* best, F16 logits, int64_t count, int64_t id) {
  uint32_t mask = mask_not_le(logits, set1(best->threshold)) & ((1u << count) - 1u);
  if (__builtin_expect(mask == 0, 1)) return;
  float lanes[kPanel];
  store(lanes, logits);
  for (; mask != 0; mask &= mask - 1) {
    const int i = __builtin_ctz(mask);
    const uint64_t key = argmax_key(lanes[i], id + i);
    if (key > best->key) *best = best_from(key, id + i + 1);
  }
}

void raise_to(uint64_t* shared, uint64_t key) {
  uint64_t seen = __atomic_load_n(shared, __ATOMIC_RELAXED);
  while (seen < key && !__atomic_compare_exchange_n(shared, &seen, key, true, __ATOMIC_RELAXED,
                                                    __ATOMIC_RELAXED)) {
  }
}

// An upper bound of a norm, from its square summed in fp32. The factor covers the rounding of that
// sum and of the dot product that the bound is for (both below 2^-17 for r <= 512); the addend
// covers squares and products that underflow. NaN and infinity pass through and prune nothing.
XPRESS_INLINE float norm_bound(float sum_of_squares) {
  return __builtin_sqrtf(sum_of_squares * 1.0001f + 1e-34f);
}

template <class T>
XPRESS_INLINE F16 squares(const T* row, int64_t r) {
  F16 even = zero(), odd = zero();
  for (int64_t k = 0; k < r; k += 2 * kLanes) {
    const F16 a = load(row + k), b = load(row + k + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  return add(even, odd);
}

// Bounds of the norms of sixteen rows of W_r, fetching what lies ahead of them.
template <class T>
XPRESS_INLINE F16 panel_norms(const T* w, int64_t r, const T* end) {
  alignas(64) float norms[kPanel];
  for (int position = 0; position < 4; ++position) {
    F16 sums[4];
    for (int i = 0; i < 4; ++i) {
      const T* row = w + (4 * i + position) * r;
      const char* far = reinterpret_cast<const char*>(row) + kStreamBytes;
      if (far < reinterpret_cast<const char*>(end)) {
        for (int64_t byte = 0; byte < r * static_cast<int64_t>(sizeof(T)); byte += 64) {
          __builtin_prefetch(far + byte, 0, 2);
        }
      }
      sums[i] = squares(row, r);
    }
    sum_lanes_of_4(sums[0], sums[1], sums[2], sums[3], norms, position);
  }
  for (int i = 0; i < kPanel; ++i) norms[i] = norm_bound(norms[i]);
  return load(norms);
}

// A chunk of the vocabulary against one tile of activation rows.
template <class T, class S>
void argmax_chunk_tile(const ReadoutRows& p, const T* readout, const S* type, int64_t begin,
                       int64_t end, int64_t row0, int64_t rows, uint64_t* keys) {
  Best best[kRowTile];
  const float* z[kRowTile];  // the rows that a panel must be computed for
  const void* base[kRowTile];
  int64_t which[kRowTile];
  for (int64_t j = 0; j < rows; ++j) {
    best[j] = best_from(__atomic_load_n(keys + row0 + j, __ATOMIC_RELAXED), begin);
  }
  bool ask = true;
  int64_t probed = 0, needed = 0;
  for (int64_t id = begin; id < end; id += kPanel) {
    const int64_t count = min64(kPanel, end - id);
    const T* w = readout + id * p.r;
    const bool bounded = ask && count == kPanel;
    const F16 norms = bounded ? panel_norms(w, p.r, readout + p.V * p.r) : zero();
    int64_t selected = 0;
    for (int64_t j = 0; j < rows; ++j) {
      const void* s = p.base[row0 + j];
      if (bounded) {
        const S* logits = static_cast<const S*>(s) + id;
        prefetch(logits + 4 * kPanel);
        const F16 bound = add(load(logits), mul(norms, set1(p.z_norms[row0 + j])));
        // An infinite bound may hide a NaN, so it is never passed over, not even for +infinity. A
        // threshold of NaN (nothing seen yet) stays NaN: min gives its second operand then.
        const F16 beaten = min(set1(kGreatestFinite), set1(best[j].threshold));
        if (mask_not_le(bound, beaten) == 0) continue;
      }
      z[selected] = p.z[row0 + j];
      base[selected] = s;
      which[selected++] = j;
    }
    if (ask && ++probed <= kProbePanels) {
      needed += selected;
      ask = probed < kProbePanels || 2 * needed <= kProbePanels * rows;
    }
    if (selected == 0) continue;
    const Ahead ahead = ask ? Ahead{} : after_panel(readout, p.V, p.r, id, selected);
    logits_of_panel(w, p.r, id, count, z, base, selected, type, ahead,
                    [&](int64_t i, F16 logits) { offer(best + which[i], logits, count, id); });
  }
  for (int64_t j = 0; j < rows; ++j) raise_to(keys + row0 + j, best[j].key);
}

}  // namespace

void readout_full(const ReadoutRows& p, const int32_t* hints, uint64_t* keys) {
  with_type(p.weight_dtype, p.readout, [&](auto* readout) {
    with_type(p.base_dtype, nullptr, [&](auto* type) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      parallel_items(p.rows, [&](int64_t i) {
        float sums[kPanel];
        const F16 square = squares(p.z[i], p.r);
        sum_lanes_of_4(square, square, square, square, sums, 0);
        p.z_norms[i] = norm_bound(sums[0]);
        keys[i] = 0;
        if (hints[i] < 0) return;
        const float base = to_float(static_cast<const S*>(p.base[i])[hints[i]]);
        keys[i] = best_candidate(p.z[i], p.r, readout, hints + i, &base, 1);
      });
      parallel_items(ceil_div(p.V, kChunk), [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk, end = min64(begin + kChunk, p.V);
        for (int64_t row0 = 0; row0 < p.rows; row0 += kRowTile) {
          const int64_t rows = min64(kRowTile, p.rows - row0);
          argmax_chunk_tile(p, readout, type, begin, end, row0, rows, keys);
        }
      });
    });
  });
}

// The argmax over one row's candidates. Four rows of W_r at a time, the next four on their way.
template <class T>
uint64_t best_candidate(const float* z, int64_t r, const T* readout, const int32_t* ids,
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

// Candidates as the operator takes them: int64 ids, base logits read where they lie.
template <class T, class S>
uint64_t best_listed(const ReadoutArgmaxParams& p, const T* readout, const float* z, const S* base,
                     const int64_t* ids) {
  uint64_t best = 0;
  for (int64_t c0 = 0; c0 < p.C; c0 += kPanel) {
    const int64_t width = min64(kPanel, p.C - c0);
    int32_t panel_ids[kPanel];
    float panel_base[kPanel];
    for (int64_t c = 0; c < width; ++c) {
      panel_ids[c] = static_cast<int32_t>(ids[c0 + c]);
      panel_base[c] = to_float(base[ids[c0 + c]]);
    }
    const uint64_t key = best_candidate(z, p.r, readout, panel_ids, panel_base, width);
    if (key > best) best = key;
  }
  return best;
}

}  // namespace

void readout_argmax(const ReadoutArgmaxParams& p, void* scratch) {
  uint64_t keys[kReadoutRows];
  int32_t hints[kReadoutRows];
  float z_norms[kReadoutRows];
  for_each_z_group(
      p.z, p.D, p.N * p.D, p.r, p.base_logits, scratch,
      [&](int64_t row0, int64_t rows, const float* const* z, const void* const* base) {
        if (p.candidates == nullptr) {
          parallel_items(rows, [&](int64_t i) {
            const int64_t row = row0 + i;
            hints[i] =
                static_cast<int32_t>(key_id(argmax_row(p.base_logits, row / p.D, row % p.D, p.V)));
          });
          readout_full(
              {rows, p.V, p.r, z, base, p.base_logits.dtype, p.readout, p.weight_dtype, z_norms},
              hints, keys);
        } else {
          with_type(p.weight_dtype, p.readout, [&](auto* readout) {
            with_type(p.base_logits.dtype, nullptr, [&](auto* type) {
              parallel_items(rows, [&](int64_t i) {
                keys[i] = best_listed(p, readout, z[i], static_cast<decltype(type)>(base[i]),
                                      p.candidates + (row0 + i) * p.C);
              });
            });
          });
        }
        for (int64_t i = 0; i < rows; ++i) {
          p.index[row0 + i] = key_id(keys[i]);
          p.value[row0 + i] = key_logit(keys[i]);
        }
      });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
