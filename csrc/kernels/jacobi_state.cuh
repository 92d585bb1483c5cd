// The state of jacobi_refine between its kernels, and the small kernels that begin, check and end
// it.
//
// Per block: the ids [predecessor, anchor, token_1 ... token_D], so that slot k's previous token is
// ids[k]; `settled`, the number of slots that later passes skip, D where the block is done; and the
// outputs passes and full_readouts, which count up in place. A block with an id outside its range
// has passes = -1 and is done.
//
// One warp serves a block, a lane per drafted slot. Everything that a call reads, it has written
// itself, so a captured graph can be replayed.
#pragma once

#include "device/barrier.h"
#include "device/memory.h"
#include "device/warp.h"
#include "kernels/readout.cuh"
#include "xpress/limits.h"
#include "xpress/params.h"

namespace xpress::kernels {

struct JacobiState {
  int64_t N;
  int B;
  int64_t V_t;
  const int64_t* d2t;      // [V] offsets, or null
  int64_t* ids;            // [N, B + 1]
  int32_t* settled;        // [N]
  int32_t* passes;         // [N]
  int32_t* full_readouts;  // [N]
  uint64_t* keys;          // [N, D]: of a full readout; 0 before it

  // The candidates of each slot; capacity is 0 where there are none.
  int capacity;
  int64_t* candidate_ids;    // [N, D, capacity] draft ids
  float* candidate_logits;   // [N, D, capacity], base logits
  int32_t* candidate_count;  // [N, D]
};

// The target id of a draft id, or -1 where d2t leads out of the table.
XPRESS_DEVICE int64_t target_id(const JacobiState& s, int64_t draft_id) {
  // The least and greatest offsets would overflow the sum, so they are compared, not added.
  const int64_t offset = s.d2t == nullptr ? 0 : device::load_global(s.d2t + draft_id);
  return offset >= -draft_id && offset < s.V_t - draft_id ? draft_id + offset : -1;
}

// What a pass did to a block.
struct Commit {
  bool valid;  // no token lies outside the table
  int settled;
};

// Writes the argmax of every unsettled slot into ids (in shared memory). f, the lowest slot that
// changed, and all below it are settled; if none changed, all are. The first warp calls this, with
// the key of slot lane + 1 in each lane.
XPRESS_DEVICE Commit commit_pass(const JacobiState& s, uint64_t key, int settled, int64_t* ids) {
  const int d = device::lane_index(), D = s.B - 1;
  const bool open = d >= settled && d < D;
  const int64_t token = open ? target_id(s, key_id(key)) : 0;
  const bool valid = device::ballot(token < 0) == 0;
  const uint32_t changed = device::ballot(open && token != ids[d + 2]);
  if (open) ids[d + 2] = token;
  return {valid, changed == 0 ? D : device::lowest_bit(changed) + 1};
}

struct JacobiStart {
  static constexpr int kThreads = 32;

  struct Params {
    JacobiState state;
    Ids anchor;       // [N]
    Ids predecessor;  // [N]
    Ids seed_tokens;  // [N, D] target ids, or null data: the best candidate of each slot
    int candidates;   // how many each slot has at first
  };
};

static XPRESS_KERNEL(JacobiStart::kThreads) jacobi_start_kernel(JacobiStart::Params p) {
  using namespace device;
  const JacobiState& s = p.state;
  const int64_t n = cta_index();
  const int lane = lane_index(), D = s.B - 1;
  int64_t* ids = s.ids + n * (s.B + 1);
  bool valid = true;
  if (lane < 2) {
    const Ids& first = lane == 0 ? p.predecessor : p.anchor;
    const int64_t id = load_global(first.data + n * first.stride0);
    valid = id >= 0 && id < s.V_t;
    store_global(ids + lane, id);
  }
  if (lane < D) {
    int64_t token;
    if (p.seed_tokens.data != nullptr) {
      token = load_global(p.seed_tokens.data + n * p.seed_tokens.stride0 +
                          lane * p.seed_tokens.stride1);
    } else {
      token = target_id(s, load_global(s.candidate_ids + (n * D + lane) * s.capacity));
    }
    valid = valid && token >= 0 && token < s.V_t;
    store_global(ids + 2 + lane, token);
    store_global(s.keys + n * D + lane, uint64_t{0});
    store_global(s.candidate_count + n * D + lane, p.candidates);
  }
  const bool all_valid = ballot(valid) == kAllLanes;
  if (lane != 0) return;
  store_global(s.settled + n, all_valid ? 0 : D);
  store_global(s.passes + n, all_valid ? 0 : -1);
  store_global(s.full_readouts + n, 0);
}

struct JacobiProve {
  static constexpr int kThreads = 32;

  struct Params {
    JacobiState state;
    StridedRows base_logits;  // [N, D, V]
  };
};

// Exact mode, after a full readout of the slots that are not yet proven: where its argmax differs
// from the token, it takes the token's place and joins the candidates; the lowest such slot, and
// all below it, are frozen for good.
static XPRESS_KERNEL(JacobiProve::kThreads) jacobi_prove_kernel(JacobiProve::Params p) {
  using namespace device;
  const JacobiState& s = p.state;
  const int64_t n = cta_index();
  const int d = lane_index(), D = s.B - 1;
  const int settled = load_global(s.settled + n);
  if (settled == D) return;
  const bool open = d >= settled && d < D;
  int64_t* token_at = s.ids + n * (s.B + 1) + 2 + d;
  const int64_t row = n * D + d;
  int64_t id = 0, token = 0;
  bool differs = false;
  if (open) {
    id = key_id(load_global(s.keys + row));
    token = target_id(s, id);
    differs = token != load_global(token_at);
    store_global(s.keys + row, uint64_t{0});
  }
  const bool valid = ballot(token < 0) == 0;
  const uint32_t mismatches = ballot(differs);
  if (differs && valid) {
    store_global(token_at, token);
    const int32_t count = load_global(s.candidate_count + row);
    store_global(s.candidate_count + row, count + 1);
    store_global(s.candidate_ids + row * s.capacity + count, id);
    with_type(p.base_logits.dtype, [&](auto* type) {
      using Base = std::remove_pointer_t<decltype(type)>;
      store_global(s.candidate_logits + row * s.capacity + count,
                   to_float(load_global(row_of<Base>(p.base_logits, row, D) + id)));
    });
  }
  if (d != 0) return;
  const int proven = !valid || mismatches == 0 ? D : lowest_bit(mismatches) + 1;
  store_global(s.settled + n, proven);
  store_global(s.full_readouts + n, load_global(s.full_readouts + n) + 1);
  if (!valid) store_global(s.passes + n, -1);
}

struct JacobiFinish {
  static constexpr int kThreads = 32;

  struct Params {
    JacobiState state;
    bool commits;     // the keys of a last pass
    int64_t* tokens;  // [N, D]
  };
};

static XPRESS_KERNEL(JacobiFinish::kThreads) jacobi_finish_kernel(JacobiFinish::Params p) {
  using namespace device;
  const JacobiState& s = p.state;
  const int64_t n = cta_index();
  const int d = lane_index(), D = s.B - 1;
  auto* ids = reinterpret_cast<int64_t*>(shared_memory());  // [B + 1]
  if (d < D) ids[d + 2] = load_global(s.ids + n * (s.B + 1) + 2 + d);
  int passes = load_global(s.passes + n);
  const int settled = load_global(s.settled + n);
  if (p.commits && settled < D) {
    const uint64_t key = d < D ? load_global(s.keys + n * D + d) : 0;
    passes = commit_pass(s, key, settled, ids).valid ? passes + 1 : -1;
  }
  if (d < D) store_global(p.tokens + n * D + d, passes < 0 ? int64_t{-1} : ids[d + 2]);
  if (d == 0) store_global(s.passes + n, passes);
}

}  // namespace xpress::kernels
