// Limits of the method's sizes, the same on every backend.
#pragma once

#include <cstdint>

namespace xpress {

constexpr int64_t kMaxBlock = 32;                 // B
constexpr int64_t kMaxBlocks = int64_t{1} << 26;  // N; rows n * D + d are held in 32 bits
constexpr int64_t kMaxRank = 512;                 // r
constexpr int64_t kMaxCandidates = 1024;          // C; MAX_TOP_C of xpress_ext/config.py

}  // namespace xpress
