// top_candidates: the C best ids of each row of base logits, by value descending, then id
// ascending, NaN first; and the plain argmax of a row, which seeds the full-vocabulary path.
//
// One streaming read of the row. A buffer of argmax keys is filled with whatever beats the C-th
// best key so far, and cut back to the best C whenever it is full; on ordinary logits a few
// hundred of the V elements ever reach the buffer, and the bound is the read of the row.
#include "operators.h"
#include "parallel.h"
#include "select.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

constexpr int64_t kFetchAhead = 4096;  // bytes; the hardware's own prefetch stops at each page

// Calls f(id, logit) in ascending order of id for every element that is greater than *threshold,
// or NaN, or anything while *threshold is NaN; more may come. f may raise *threshold.
template <class S, class F>
XPRESS_INLINE void for_each_above(const S* row, int64_t V, const float* threshold, const F& f) {
  constexpr int kUnroll = 4;
  float lanes[kLanes];
  int64_t v = 0;
  for (; v + kUnroll * kLanes <= V; v += kUnroll * kLanes) {
    const F16 bound = set1(*threshold);
    const char* ahead = reinterpret_cast<const char*>(row + v) + kFetchAhead;
    for (size_t byte = 0; byte < kUnroll * kLanes * sizeof(S); byte += 64) prefetch(ahead + byte);
    uint32_t masks[kUnroll], any = 0;
#pragma GCC unroll 4
    for (int u = 0; u < kUnroll; ++u)
      any |= masks[u] = mask_not_le(load(row + v + u * kLanes), bound);
    if (__builtin_expect(any == 0, 1)) continue;
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t id = v + u * kLanes;
      store(lanes, load(row + id));
      for (; masks[u] != 0; masks[u] &= masks[u] - 1) {
        const int i = __builtin_ctz(masks[u]);
        f(id + i, lanes[i]);
      }
    }
  }
  for (; v < V; ++v) f(v, to_float(row[v]));
}

// A threshold that lets NaN through and, once NaN is the bound, nothing else.
XPRESS_INLINE float threshold_of(uint64_t key) {
  const float logit = key_logit(key);
  return logit != logit ? __builtin_inff() : logit;
}

template <class S>
void top_of_row(const S* row, int64_t V, int64_t C, uint64_t* best) {
  uint64_t keys[kMaxCandidates + kSelectSlack];
  // A small slack keeps the bound tight, a large one cuts the buffer back less often.
  const int64_t capacity = C + max64(32, min64(C, kSelectSlack));
  int64_t count = 0;
  uint64_t bound = 0;
  float threshold = __builtin_nanf("");
  for_each_above(row, V, &threshold, [&](int64_t id, float logit) {
    const uint64_t key = argmax_key(logit, id);
    if (key <= bound) return;
    keys[count++] = key;
    if (count == capacity) {
      bound = keep_greatest(keys, count, C);
      threshold = threshold_of(bound);
      count = C;
    }
  });
  sort_greatest(keys, count, C);
  for (int64_t i = 0; i < C; ++i) best[i] = keys[i];
}

template <class S>
uint64_t argmax_of_row(const S* row, int64_t V) {
  uint64_t best = 0;
  float threshold = __builtin_nanf("");
  for_each_above(row, V, &threshold, [&](int64_t id, float logit) {
    const uint64_t key = argmax_key(logit, id);
    if (key <= best) return;
    best = key;
    threshold = threshold_of(key);
  });
  return best;
}

}  // namespace

void top_keys(const StridedRows& base_logits, int64_t n, int64_t d, int64_t V, int64_t C,
              uint64_t* best) {
  with_type(base_logits.dtype, base_logits.row(n, d),
            [&](auto* row) { top_of_row(row, V, C, best); });
}

uint64_t argmax_row(const StridedRows& base_logits, int64_t n, int64_t d, int64_t V) {
  uint64_t best = 0;
  with_type(base_logits.dtype, base_logits.row(n, d),
            [&](auto* row) { best = argmax_of_row(row, V); });
  return best;
}

void top_candidates(const TopCandidatesParams& p) {
  parallel_items(p.N * p.D, [&](int64_t item) {
    uint64_t best[kMaxCandidates];
    top_keys(p.base_logits, item / p.D, item % p.D, p.V, p.C, best);
    for (int64_t i = 0; i < p.C; ++i) {
      p.ids[item * p.C + i] = key_id(best[i]);
      p.logits[item * p.C + i] = key_logit(best[i]);
    }
  });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
