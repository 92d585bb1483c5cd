// The launch functions of the CUDA backend, one per operator, free of torch.
//
// Each enqueues its kernels on `stream` (a cudaStream_t) of the current device and waits for
// nothing. All pointers are to device memory; `scratch` is the caller's, 128-byte aligned, of the
// size that the function beside it tells, and its contents need not survive the call. Sizes have
// been checked against the operators' limits; ids have not, since nothing may be read back: what an
// id outside its range leads to is said at each function, and it is never a read out of bounds.
#pragma once

#include "xpress/device_limits.h"
#include "xpress/params.h"
#include "xpress/status.h"

namespace xpress::cuda {

int64_t project_scratch_bytes(int64_t N, int64_t B, int64_t H);
Status project_hidden(const ProjectHiddenParams& p, void* scratch, const DeviceLimits& limits,
                      void* stream);

Status causal_mix(const CausalMixParams& p, const DeviceLimits& limits, void* stream);
Status causal_mix_backward(const CausalMixBackwardParams& p, const DeviceLimits& limits,
                           void* stream);

// A block with an id outside [0, V_t) becomes NaN.
Status fuse_mix(const FuseMixParams& p, const DeviceLimits& limits, void* stream);

int64_t mlp_scratch_bytes(int64_t rows, int64_t m);
Status refiner_mlp(const RefinerMlpParams& p, void* scratch, const DeviceLimits& limits,
                   void* stream);

Status top_candidates(const TopCandidatesParams& p, const DeviceLimits& limits, void* stream);

// A slot with a candidate outside [0, V) gets index -1 and value NaN.
int64_t readout_scratch_bytes(int64_t rows);
Status readout_argmax(const ReadoutArgmaxParams& p, void* scratch, const DeviceLimits& limits,
                      void* stream);

Status refined_logits(const RefinedLogitsParams& p, const DeviceLimits& limits, void* stream);

// A block with an id outside its range, a d2t entry that leads outside [0, V_t) included, gets
// tokens and passes of -1.
int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                               bool exact);
Status jacobi_refine(const JacobiRefineParams& p, const DeviceLimits& limits, void* stream);

}  // namespace xpress::cuda
