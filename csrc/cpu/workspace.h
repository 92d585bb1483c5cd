// The workspace of jacobi_refine: one caller-owned buffer, cut into the arrays below.
//
// Size: N*B*r*16 bytes of latents; N*(B-1)*C*8 bytes of candidates, C + B-1 of them where exact
// mode may add some; at most N*B*64 bytes of bookkeeping; and as scratch the larger of 128*m*4
// bytes and of kProjectScratchBytes (one block's (B+1)*H*4 bytes where that is more). It does not
// depend on V.
#pragma once

#include <cstdint>

#include "limits.h"

namespace xpress::cpu {

struct JacobiShape {
  int64_t N, B, H, r, m, top_c;
  bool exact;
};

static inline JacobiShape jacobi_shape(const JacobiRefineParams& p) {
  return {p.N, p.B, p.H, p.r, p.m, p.top_c, p.exact};
}

struct JacobiWorkspace {
  float* context;            // [N, B, r]
  float* c;                  // [N, B, r]
  float* rounded_c;          // [N, B, r]
  float* z;                  // [N, B, r]
  int64_t* ids;              // [N, B + 1]: predecessor, anchor, tokens; prev of slot k is ids[k]
  uint64_t* keys;            // [N * D]
  const float** z_rows;      // [N * D]
  const void** base_rows;    // [N * D]
  int32_t* rows;             // [N * D]
  int32_t* best_ids;         // [N * D]: draft ids of the tokens, -1 where unknown
  int32_t* hints;            // [N * D]
  float* z_norms;            // [N * D]
  int32_t* settled;          // [N]: slots up to here are skipped
  int32_t* proven;           // [N]: exact mode, slots frozen for good
  int32_t* done;             // [N]: 1 at its fixed point, later passes leave the block out
  int64_t capacity;          // candidates a slot may hold: C, or C + D where exact adds some
  int32_t* candidate_ids;    // [N * D, capacity]
  float* candidate_logits;   // [N * D, capacity]
  int32_t* candidate_count;  // [N * D]
  void* scratch;             // project_hidden's, then the MLP's hidden layer
  int64_t bytes;

  // With a null base: only `bytes` is meant.
  JacobiWorkspace(void* base, const JacobiShape& s) : next_(reinterpret_cast<uintptr_t>(base)) {
    const uintptr_t begin = next_;
    const int64_t D = s.B - 1, slots = s.N * s.B, drafted = s.N * D;
    take(&context, slots * s.r);
    take(&c, slots * s.r);
    take(&rounded_c, slots * s.r);
    take(&z, slots * s.r);
    take(&ids, s.N * (s.B + 1));
    take(&keys, drafted);
    take(&z_rows, drafted);
    take(&base_rows, drafted);
    take(&rows, drafted);
    take(&best_ids, drafted);
    take(&hints, drafted);
    take(&z_norms, drafted);
    take(&settled, s.N);
    take(&proven, s.N);
    take(&done, s.N);
    capacity = s.top_c == 0 ? 0 : s.top_c + (s.exact ? D : 0);
    take(&candidate_ids, drafted * capacity);
    take(&candidate_logits, drafted * capacity);
    take(&candidate_count, s.top_c == 0 ? 0 : drafted);
    const int64_t project = project_scratch_bytes(s.N, s.B, s.H), mlp = kMlpRows * s.m * 4;
    char* bytes_of_scratch;
    take(&bytes_of_scratch, project > mlp ? project : mlp);
    scratch = bytes_of_scratch;
    bytes = static_cast<int64_t>(next_ - begin);
  }

 private:
  template <class T>
  void take(T** array, int64_t count) {
    *array = reinterpret_cast<T*>(next_);
    next_ += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

  uintptr_t next_;
};

}  // namespace xpress::cpu
