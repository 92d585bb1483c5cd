// This instruction set's operators, as dispatch.cpp finds them.
#include "dispatch.h"
#include "operators.h"

#define XPRESS_STRING_OF(x) #x
#define XPRESS_STRING(x) XPRESS_STRING_OF(x)

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

extern const Kernels kTable;
const Kernels kTable = {
    XPRESS_STRING(XPRESS_CPU_NAMESPACE),
    project_hidden,
    causal_mix,
    causal_mix_backward,
    fuse_mix,
    refiner_mlp,
    top_candidates,
    readout_argmax,
    refined_logits,
    jacobi_refine,
};

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE
