// Before and after a full readout as an operator of its own: keys that stand for "nothing seen
// yet", and keys taken apart into ids and logits. 8 to 20 bytes a row.
#pragma once

#include "device/memory.h"
#include "xpress/argmax_key.h"

namespace xpress::kernels {

struct ReadoutKeys {
  static constexpr int kThreads = 256;

  struct Params {
    int64_t rows;
    uint64_t* keys;  // [rows]
    int64_t* index;  // [rows]
    float* value;    // [rows]
  };
};

XPRESS_DEVICE int64_t row_of_thread() {
  return device::cta_index() * device::thread_count() + device::thread_index();
}

static XPRESS_KERNEL(ReadoutKeys::kThreads) clear_keys_kernel(ReadoutKeys::Params p) {
  if (row_of_thread() < p.rows) device::store_global(p.keys + row_of_thread(), uint64_t{0});
}

static XPRESS_KERNEL(ReadoutKeys::kThreads) read_keys_kernel(ReadoutKeys::Params p) {
  const int64_t row = row_of_thread();
  if (row >= p.rows) return;
  const uint64_t key = device::load_global(p.keys + row);
  device::store_global(p.index + row, key_id(key));
  device::store_global(p.value + row, key_logit(key));
}

}  // namespace xpress::kernels
