#include "select.h"

#include <algorithm>
#include <functional>

namespace xpress::cpu {

uint64_t keep_greatest(uint64_t* keys, int64_t count, int64_t keep) {
  std::nth_element(keys, keys + keep - 1, keys + count, std::greater<uint64_t>());
  return keys[keep - 1];
}

void sort_greatest(uint64_t* keys, int64_t count, int64_t keep) {
  std::partial_sort(keys, keys + keep, keys + count, std::greater<uint64_t>());
}

}  // namespace xpress::cpu
