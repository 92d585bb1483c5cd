// The argmax key: one unsigned 64-bit integer per (logit, vocabulary id), so that "greater logit,
// then lower id" is plain integer order (docs/method.md, "Numbers").
//
// High half: the logit's bits, mapped to an order-preserving unsigned integer after -0 became +0
// and every NaN the greatest value. Low half: the inverted vocabulary id. No key is 0, so 0 means
// "nothing seen yet".
#pragma once

#include <cstdint>
#include <cstring>

#include "xpress/dtype.h"

namespace xpress {

XPRESS_HOST_DEVICE static inline uint64_t argmax_key(float logit, int64_t id) {
  uint32_t bits;
  if (logit != logit) {
    bits = 0xffffffffu;
  } else {
    logit += 0.0f;  // -0 becomes +0
    std::memcpy(&bits, &logit, sizeof(bits));
    bits = (bits >> 31) ? ~bits : (bits | 0x80000000u);
  }
  return (static_cast<uint64_t>(bits) << 32) | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}

XPRESS_HOST_DEVICE static inline int64_t key_id(uint64_t key) {
  return static_cast<int64_t>(~static_cast<uint32_t>(key));
}

// The logit of a key: -0 has become +0 and a NaN the canonical quiet one.
XPRESS_HOST_DEVICE static inline float key_logit(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = (bits == 0xffffffffu) ? 0x7fc00000u : ((bits >> 31) ? (bits & 0x7fffffffu) : ~bits);
  float logit;
  std::memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

}  // namespace xpress
