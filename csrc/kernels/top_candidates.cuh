// top_candidates: the C greatest logits of each slot and their ids, in order; ties by lowest id,
// NaN first. Exact, for any C up to 1024.
//
// A cluster of CTAs serves a slot (one CTA where there are no clusters), each with a contiguous
// share of the vocabulary that it reads once, keeps in shared memory where that fits, and compares
// as argmax keys: 64-bit integers, no two alike, whose order is "greater logit, then lower id".
//
// 1. Every thread finds the greatest key of its elements, and groups of threads theirs. Of G group
//    maxima the C-th greatest is a lower bound of the C-th greatest key, since C keys at least are
//    as great. For C = 1 it is the answer.
// 2. The keys that reach the bound are collected; of logits in no particular order these are few
//    more than C (for G >= 2C at most G ln 2 are expected). If they are more than the list can
//    hold, as where most of the vocabulary is masked by one value, the C-th greatest of those that
//    it does hold is a greater lower bound, and the walk is repeated with it. Keys are distinct and
//    the list is longer than C, so that every walk leaves fewer.
// 3. One CTA sorts the list and writes its first C.
//
// Floor, Qwen3-8B head, N=1: 4.6 MB of logits, 1 us at 4.3 TB/s over 120 SMs; the exchange and the
// sort are latency.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "device/warp.h"
#include "kernels/readout.cuh"

namespace xpress::kernels {

struct TopCandidates {
  static constexpr int kMaxThreads = 1024;
  static constexpr int kMaxGroups = 2048;
  static constexpr int kList = 4096;   // a power of two, at least 2 * 1024
  static constexpr int kRanked = 512;  // groups: of more, maxima are sorted rather than ranked

  struct Params {
    int64_t D, V;
    int C;
    int group;                // threads of a group: a power of two up to 32
    int64_t capacity;         // of a row of ids and logits
    bool keeps;               // the share of a CTA fits into shared memory
    StridedRows base_logits;  // [N, D, V]
    int64_t* ids;             // [N, D, capacity]
    float* logits;            // [N, D, capacity]
  };

  struct Shared {
    uint64_t maxima[kMaxGroups];  // of all groups of the cluster, in every CTA
    uint64_t list[kList];         // in the first CTA
    uint64_t bound;
    uint32_t counts[2];  // of the list, in the first CTA; used in turn
    // then the CTA's share of the logits, at the same place in a line of 16 bytes as in memory
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;
};

// Element j of 16 bytes, as fp32. j is known when the loop around it is unrolled.
template <class Base>
XPRESS_DEVICE float element(const Bytes16& bytes, int j) {
  if constexpr (sizeof(Base) == 4) {
    return device::bits_to_float(bytes.word[j]);
  } else {
    return device::to_float(Base{static_cast<uint16_t>(bytes.word[j / 2] >> (16 * (j % 2)))});
  }
}

// A CTA's share of one row, walked in 16-byte loads but for its ragged ends.
template <class Base>
struct LogitShare {
  const Base* begin;
  int64_t first_id, count;
  char* kept;  // the copy in shared memory, or null

  // Calls visit(id, logit) for the elements of this thread, always the same ones. The first walk
  // reads global memory, and fills the copy; later ones read the copy.
  template <class Visit>
  XPRESS_DEVICE void walk(bool is_first, const Visit& visit) const {
    using namespace device;
    constexpr int kElements = 16 / sizeof(Base);
    const auto address = reinterpret_cast<uintptr_t>(begin);
    int64_t head = static_cast<int64_t>((16 - address % 16) % 16 / sizeof(Base));
    if (head > count) head = count;
    const int64_t vectors = (count - head) / kElements, tail = head + vectors * kElements;
    auto* copy = reinterpret_cast<Base*>(kept + address % 16);
    const auto one = [&](int64_t i) {
      const Base value = is_first || kept == nullptr ? load_global(begin + i) : copy[i];
      if (is_first && kept != nullptr) copy[i] = value;
      visit(first_id + i, to_float(value));
    };
    for (int64_t i = thread_index(); i < head; i += thread_count()) one(i);
    for (int64_t i = thread_index(); i < vectors; i += thread_count()) {
      const int64_t at = head + i * kElements;
      auto* copied = reinterpret_cast<Bytes16*>(copy + at);
      const Bytes16 bytes = is_first || kept == nullptr
                                ? load_global(reinterpret_cast<const Bytes16*>(begin + at))
                                : *copied;
      if (is_first && kept != nullptr) *copied = bytes;
      XPRESS_UNROLL
      for (int j = 0; j < kElements; ++j) visit(first_id + at + j, element<Base>(bytes, j));
    }
    for (int64_t i = tail + thread_index(); i < count; i += thread_count()) one(i);
  }
};

// Sorts a power of two of keys in shared memory, the greatest first (bitonic).
XPRESS_DEVICE void sort_keys(uint64_t* keys, int count) {
  using namespace device;
  for (int size = 2; size <= count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      cta_sync();
      for (int i = thread_index(); i < count / 2; i += thread_count()) {
        const int low = i / distance * 2 * distance + i % distance, high = low + distance;
        const bool descends = (low & size) == 0;
        const uint64_t a = keys[low], b = keys[high];
        if ((a < b) == descends) {
          keys[low] = b;
          keys[high] = a;
        }
      }
    }
  }
  cta_sync();
}

// The C-th greatest of `count` distinct keys (those of empty groups, 0, aside), to *bound. `count`
// is a power of two. Reorders the keys.
XPRESS_DEVICE void find_bound(uint64_t* maxima, int count, int C, uint64_t* bound) {
  if (count > TopCandidates::kRanked) {  // count^2 comparisons would outweigh all the rest
    sort_keys(maxima, count);
    if (device::thread_index() == 0) *bound = maxima[C - 1];
    return;
  }
  for (int i = device::thread_index(); i < count; i += device::thread_count()) {
    const uint64_t own = maxima[i];
    int greater = 0;
    for (int j = 0; j < count; ++j) greater += maxima[j] > own ? 1 : 0;
    if (greater == C - 1 && own != 0) *bound = own;
  }
}

template <class Base>
XPRESS_DEVICE void top_candidates_of_row(const TopCandidates::Params& p, int64_t row) {
  using namespace device;
  auto& shared = *reinterpret_cast<TopCandidates::Shared*>(shared_memory());
  const int64_t size = (p.V + cluster_size() - 1) / cluster_size();
  const int64_t begin = size * cluster_rank() < p.V ? size * cluster_rank() : p.V;
  const int64_t count = p.V - begin < size ? p.V - begin : size;
  const LogitShare<Base> share{row_of<Base>(p.base_logits, row, p.D) + begin, begin, count,
                               p.keeps ? shared_memory() + TopCandidates::kSharedBytes : nullptr};

  uint64_t best = 0;
  share.walk(/*is_first=*/true,
             [&](int64_t id, float logit) { best = max(best, argmax_key(logit, id)); });
  for (int lanes = 1; lanes < p.group; lanes *= 2) best = max(best, shuffle_xor(best, lanes));
  if (thread_index() == 0) {
    shared.bound = 0;
    shared.counts[0] = 0;
  }
  cluster_sync();  // every CTA runs
  const int groups_of_cta = thread_count() / p.group;
  if (thread_index() % p.group == 0) {
    const int group = cluster_rank() * groups_of_cta + thread_index() / p.group;
    for (int rank = 0; rank < cluster_size(); ++rank) {
      *cluster_map(&shared.maxima[group], rank) = best;
    }
  }
  cluster_sync();
  find_bound(shared.maxima, groups_of_cta * cluster_size(), p.C, &shared.bound);
  cta_sync();

  if (p.C == 1) {
    if (cluster_rank() == 0 && thread_index() == 0) {
      store_global(p.ids + row * p.capacity, key_id(shared.bound));
      store_global(p.logits + row * p.capacity, key_logit(shared.bound));
    }
    return;
  }

  uint64_t* list = cluster_map(shared.list, 0);
  uint64_t bound = max(shared.bound, 1);
  uint32_t found = 0;
  for (int round = 0;; ++round) {
    uint32_t* number = cluster_map(&shared.counts[round % 2], 0);
    bool is_full = false;  // no more is asked of the counter, which all threads share
    share.walk(/*is_first=*/false, [&](int64_t id, float logit) {
      const uint64_t key = argmax_key(logit, id);
      if (key < bound || is_full) return;
      const uint32_t place = atomic_add_shared(number, 1);
      is_full = place >= TopCandidates::kList;
      if (!is_full) list[place] = key;
    });
    if (thread_index() == 0) shared.counts[(round + 1) % 2] = 0;
    cluster_sync();
    found = *number;
    if (found <= TopCandidates::kList) break;
    if (cluster_rank() == 0) {
      sort_keys(shared.list, TopCandidates::kList);
      if (thread_index() < cluster_size()) {
        *cluster_map(&shared.bound, thread_index()) = shared.list[p.C - 1];
      }
    }
    cluster_sync();
    bound = shared.bound;
  }
  // The first CTA's counts have been read before it may leave.
  cluster_sync();
  if (cluster_rank() != 0) return;
  int padded = 1;
  while (padded < static_cast<int>(found)) padded *= 2;
  for (int i = static_cast<int>(found) + thread_index(); i < padded; i += thread_count()) {
    shared.list[i] = 0;
  }
  sort_keys(shared.list, padded);
  for (int i = thread_index(); i < p.C; i += thread_count()) {
    store_global(p.ids + row * p.capacity + i, key_id(shared.list[i]));
    store_global(p.logits + row * p.capacity + i, key_logit(shared.list[i]));
  }
}

static XPRESS_KERNEL(TopCandidates::kMaxThreads) top_candidates_kernel(TopCandidates::Params p) {
  const int64_t row = device::cta_index() / device::cluster_size();
  with_type(p.base_logits.dtype, [&](auto* type) {
    top_candidates_of_row<std::remove_const_t<std::remove_pointer_t<decltype(type)>>>(p, row);
  });
}

}  // namespace xpress::kernels
