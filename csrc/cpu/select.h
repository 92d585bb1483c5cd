// Selection of the greatest argmax keys. Compiled once, without instruction-set flags: it
// instantiates the standard library, whose templates the linker merges between builds.
#pragma once

#include <cstdint>

namespace xpress::cpu {

// Moves the `keep` greatest of keys[0, count) to the front, in any order, and returns the least of
// them. 1 <= keep <= count.
uint64_t keep_greatest(uint64_t* keys, int64_t count, int64_t keep);

// The `keep` greatest of keys[0, count), in descending order, at the front. keep <= count.
void sort_greatest(uint64_t* keys, int64_t count, int64_t keep);

}  // namespace xpress::cpu
