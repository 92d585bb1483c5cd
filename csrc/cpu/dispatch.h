// The CPU operators behind one table; which instruction set fills it is decided at first use.
#pragma once

#include <cstdint>

#include "limits.h"
#include "xpress/params.h"

namespace xpress::cpu {

struct Kernels {
  const char* isa;
  void (*project_hidden)(const ProjectHiddenParams&, void* scratch);
  void (*causal_mix)(const CausalMixParams&);
  void (*causal_mix_backward)(const CausalMixBackwardParams&);
  void (*fuse_mix)(const FuseMixParams&);
  void (*refiner_mlp)(const RefinerMlpParams&, void* scratch);
  void (*top_candidates)(const TopCandidatesParams&);
  void (*readout_argmax)(const ReadoutArgmaxParams&, void* scratch);
  void (*refined_logits)(const RefinedLogitsParams&, void* scratch);
  void (*jacobi_refine)(const JacobiRefineParams&);
};

// AVX-512 (F, BW, DQ, VL), else AVX2 (with FMA and F16C), else portable; XPRESS_CPU_ISA =
// avx512 | avx2 | portable forces one. Throws std::invalid_argument where the variable names
// something else or something that this CPU or build lacks.
const Kernels& kernels();

// The name of the instruction set in use: "avx512", "avx2" or "portable".
const char* isa_name();

// Bytes of jacobi_refine's workspace.
int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                               bool exact);

}  // namespace xpress::cpu
