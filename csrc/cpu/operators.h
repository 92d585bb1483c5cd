// The CPU operators as this instruction set builds them, and the inner parts that jacobi_refine
// shares with the single operators. One .cpp per operator, named after it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dots.h"
#include "limits.h"
#include "xpress/params.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

void project_hidden(const ProjectHiddenParams& p, void* scratch);
void causal_mix(const CausalMixParams& p);
void causal_mix_backward(const CausalMixBackwardParams& p);
void fuse_mix(const FuseMixParams& p);
void refiner_mlp(const RefinerMlpParams& p, void* scratch);
void top_candidates(const TopCandidatesParams& p);
void readout_argmax(const ReadoutArgmaxParams& p, void* scratch);
void refined_logits(const RefinedLogitsParams& p, void* scratch);
void jacobi_refine(const JacobiRefineParams& p);

// ---- inner parts ----------------------------------------------------------------------------

// c of slots first..B-1 of one block. context, out: [B, r]; prev: [B] target ids.
template <class T>
void fuse_mix_block(const float* context, const int64_t* prev, const T* token_table,
                    const float* mixer, int64_t B, int64_t r, int64_t first, float* out);

// At most kMlpRows rows, each behind its own pointer.
template <class T>
struct RefinerMlpRows {
  int64_t rows, r, m;
  const float* const* c;          // [rows][r]
  const float* const* rounded_c;  // [rows][r], rounded to T
  const T* mlp_gate_up;           // [2m, r]
  const T* mlp_down;              // [r, m]
  float* mlp_hidden;              // [rows, m] scratch
  float* const* z;                // [rows][r], rounded to T
};

template <class T>
void refiner_mlp_rows(const RefinerMlpRows<T>& p);

// The argmax keys of one row's C best ids, greatest first.
void top_keys(const StridedRows& base_logits, int64_t n, int64_t d, int64_t V, int64_t C,
              uint64_t* best);

// The argmax key of one row.
uint64_t argmax_row(const StridedRows& base_logits, int64_t n, int64_t d, int64_t V);

// Rows of widened z and of base logits, each behind its own pointer.
struct ReadoutRows {
  int64_t rows, V, r;
  const float* const* z;    // [rows][r]
  const void* const* base;  // [rows][V]
  DType base_dtype;
  const void* readout;  // [V, r]
  DType weight_dtype;
  float* z_norms;  // [rows] scratch
};

// keys [rows]: the argmax key of each row over the whole vocabulary. hints [rows]: a draft id whose
// logit is likely to be high, or -1; it never changes the result, only the work.
void readout_full(const ReadoutRows& p, const int32_t* hints, uint64_t* keys);

// The greatest argmax key among `count` >= 1 candidates; base holds their base logits.
template <class T>
uint64_t best_candidate(const float* z, int64_t r, const T* readout, const int32_t* ids,
                        const float* base, int64_t count);

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
