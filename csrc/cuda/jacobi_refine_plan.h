// Workspace and shared memory of jacobi_refine. No choice here changes a bit of the result.
//
// Workspace: N*B*r*12 bytes of latents, N*(B-1)*C*12 bytes of candidates (C + B-1 of them where
// exact mode may add some), project_hidden's scratch, and at most N*B*24 bytes of state. It does
// not depend on V.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xpress/device_limits.h"

namespace xpress::cuda {

struct JacobiShape {
  int64_t N, B, H, r, m, top_c;
  bool exact;
};

// One caller-owned buffer, cut into arrays at multiples of 128 bytes. With a null base only `bytes`
// is meant.
struct JacobiWorkspace {
  float* context;            // [N, B, r]
  float* c;                  // [N, B, r]; before the first pass, the projected hidden states
  void* z;                   // [N, B, r], in the widest weight type
  int64_t* ids;              // [N, B + 1]
  int32_t* settled;          // [N]
  uint64_t* keys;            // [N, D]
  int64_t capacity;          // candidates that a slot may have; at least one, its seed
  int64_t* candidate_ids;    // [N, D, capacity]
  float* candidate_logits;   // [N, D, capacity]
  int32_t* candidate_count;  // [N, D]
  void* project_scratch;
  int64_t bytes;

  JacobiWorkspace(void* base, const JacobiShape& s, int64_t project_scratch_bytes)
      : next_(reinterpret_cast<uintptr_t>(base)) {
    const uintptr_t begin = next_;
    const int64_t D = s.B - 1, latents = s.N * s.B * s.r;
    take(&context, latents);
    take(&c, latents);
    float* widest_z;
    take(&widest_z, latents);
    z = widest_z;
    take(&ids, s.N * (s.B + 1));
    take(&settled, s.N);
    take(&keys, s.N * D);
    capacity = std::max<int64_t>(s.top_c, 1) + (s.exact ? D : 0);
    take(&candidate_ids, s.N * D * capacity);
    take(&candidate_logits, s.N * D * capacity);
    take(&candidate_count, s.N * D);
    char* scratch;
    take(&scratch, project_scratch_bytes);
    project_scratch = scratch;
    bytes = static_cast<int64_t>(next_ - begin);
  }

 private:
  template <class T>
  void take(T** array, int64_t count) {
    *array = reinterpret_cast<T*>(next_);
    next_ += (static_cast<uintptr_t>(count) * sizeof(T) + 127) / 128 * 128;
  }

  uintptr_t next_;
};

struct JacobiPlan {
  int cluster;  // CTAs that serve a block
  int chunk;    // columns of the hidden layer in shared memory at a time; 0: nothing fits
  int64_t shared_bytes;
};

// The whole hidden layer where it fits beside the rest, else the widest chunk that does.
inline JacobiPlan plan_jacobi(int64_t B, int64_t r, int64_t m, int64_t element_size,
                              int64_t fixed_bytes, const DeviceLimits& limits) {
  // The stride of padded_stride() (kernels/products.cuh), at most.
  const auto row_bytes = [&](int64_t width) { return width * element_size + 64; };
  const int64_t others = fixed_bytes + (B > 16 ? 32 : 16) * row_bytes(r);
  int64_t chunk = m;
  while (chunk > 0 && others + 16 * row_bytes(chunk) > limits.shared_bytes_per_cta) chunk -= 32;
  return {limits.has_clusters ? 8 : 1, static_cast<int>(chunk), others + 16 * row_bytes(chunk)};
}

}  // namespace xpress::cuda
