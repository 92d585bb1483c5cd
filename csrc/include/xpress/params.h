// Parameters of every operator: plain structs, the shape behind every pointer.
//
// N blocks, B slots in a block, D = B - 1 drafted slots, V draft vocabulary, V_t target vocabulary,
// H drafter width, r rank, m MLP width, C candidates (docs/method.md). Strides count elements.
// A caller has checked shapes, types, alignment and ids before it fills one of these.
#pragma once

#include <cstdint>

#include "xpress/dtype.h"

namespace xpress {

// [n0, n1, width] with any outer strides and a contiguous innermost dimension.
struct StridedRows {
  const void* data;
  DType dtype;
  int64_t stride0;
  int64_t stride1;

  XPRESS_HOST_DEVICE const void* row(int64_t i0, int64_t i1) const {
    return static_cast<const char*>(data) + (i0 * stride0 + i1 * stride1) * element_size(dtype);
  }
};

// int64 ids [n0, n1] with any strides (stride1 is 0 for a vector [n0]).
struct Ids {
  const int64_t* data;
  int64_t stride0;
  int64_t stride1;

  XPRESS_HOST_DEVICE int64_t at(int64_t i0, int64_t i1 = 0) const {
    return data[i0 * stride0 + i1 * stride1];
  }
};

struct ProjectHiddenParams {
  int64_t N, B, H, r;
  StridedRows hidden;       // [N, B, H]
  const void* hidden_proj;  // [2, r, H] weight type: A_h, A_g
  DType weight_dtype;
  float* out;  // [N, B, r]
};

struct CausalMixParams {
  int64_t N, B, r;
  bool is_double;     // all tensors fp64 instead of fp32
  const void* x;      // [N, B, r]
  const void* mixer;  // [B, B, r], read for j <= k only
  void* out;          // [N, B, r]
};

struct CausalMixBackwardParams {
  int64_t N, B, r;
  bool is_double;
  const void* grad_out;  // [N, B, r]
  const void* x;         // [N, B, r]
  const void* mixer;     // [B, B, r]
  void* grad_x;          // [N, B, r]
  void* grad_mixer;      // [B, B, r], zero above the diagonal
};

struct FuseMixParams {
  int64_t N, B, r, V_t;
  const float* context;     // [N, B, r]
  Ids prev;                 // [N, B] target ids
  const void* token_table;  // [V_t, r] weight type
  DType weight_dtype;
  const float* mixer;  // [B, B, r], read for j <= k only
  float* out;          // [N, B, r]
};

struct RefinerMlpParams {
  int64_t rows, r, m;
  const float* c;           // [rows, r]
  const void* mlp_gate_up;  // [2m, r] weight type, gate rows first
  const void* mlp_down;     // [r, m] weight type
  DType weight_dtype;
  void* out;  // [rows, r] weight type
};

struct TopCandidatesParams {
  int64_t N, D, V, C;
  StridedRows base_logits;  // [N, D, V]
  int64_t* ids;             // [N, D, C] draft ids, best first
  float* logits;            // [N, D, C]
};

struct ReadoutArgmaxParams {
  int64_t N, D, V, r, C;    // C is 0 for the full vocabulary
  StridedRows z;            // [N, D, r] weight type
  StridedRows base_logits;  // [N, D, V]
  const void* readout;      // [V, r] weight type
  DType weight_dtype;
  const int64_t* candidates;  // [N, D, C] draft ids, or null
  int64_t* index;             // [N, D] draft ids
  float* value;               // [N, D]
};

struct RefinedLogitsParams {
  int64_t R, V, r;
  StridedRows z;            // [1, R, r] weight type
  StridedRows base_logits;  // [1, R, V]
  const void* readout;      // [V, r] weight type
  DType weight_dtype;
  float* out;  // [R, V]
};

struct JacobiRefineParams {
  int64_t N, B, V, V_t, H, r, m;
  StridedRows base_logits;  // [N, D, V]
  StridedRows hidden;       // [N, B, H]
  Ids anchor;               // [N] target ids
  Ids predecessor;          // [N] target ids
  const void* hidden_proj;  // [2, r, H]
  const void* token_table;  // [V_t, r]
  const float* mixer;       // [B, B, r]
  const void* mlp_gate_up;  // [2m, r]
  const void* mlp_down;     // [r, m]
  const void* readout;      // [V, r]
  DType weight_dtype;
  int64_t num_passes;
  int64_t top_c;  // 0: the full vocabulary
  bool exact;
  Ids seed_tokens;         // [N, D] target ids; data is null for the argmax of base_logits
  const int64_t* d2t;      // [V] offsets, or null
  int64_t* tokens;         // [N, D] target ids
  int32_t* passes;         // [N]
  int32_t* full_readouts;  // [N]
  void* workspace;         // jacobi_workspace() bytes, aligned to 64 bytes, on a GPU to 128
};

}  // namespace xpress
