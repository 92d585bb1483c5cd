// Scratch sizes of the CPU backend, independent of the instruction set.
#pragma once

#include <cstdint>

#include "xpress/limits.h"
#include "xpress/params.h"

namespace xpress::cpu {

constexpr int64_t kSelectSlack = 512;  // keys gathered beyond C before the least are dropped
constexpr int64_t kMlpRows = 128;      // rows that share one sweep over the MLP's weights
constexpr int64_t kReadoutRows = 256;  // rows that share one sweep over W_r in the operators
constexpr int64_t kProjectScratchBytes = 2 << 20;

// Blocks that project_hidden widens at a time: at least one.
static inline int64_t project_group(int64_t N, int64_t B, int64_t H) {
  const int64_t fit = kProjectScratchBytes / ((B + 1) * H * 4);
  return fit < 1 ? 1 : (fit > N ? N : fit);
}

static inline int64_t project_scratch_bytes(int64_t N, int64_t B, int64_t H) {
  return project_group(N, B, H) * (B + 1) * H * 4;
}
static inline int64_t mlp_scratch_bytes(int64_t r, int64_t m) { return kMlpRows * (2 * r + m) * 4; }
static inline int64_t readout_scratch_bytes(int64_t r) { return kReadoutRows * r * 4; }

}  // namespace xpress::cpu
