#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "workspace.h"

namespace xpress::cpu {

namespace avx512 {
extern const Kernels kTable;
}
namespace avx2 {
extern const Kernels kTable;
}
namespace portable {
extern const Kernels kTable;
}

namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#endif

// The table of an instruction set, or null where this CPU or build lacks it.
const Kernels* table_of(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return has_avx512() ? &avx512::kTable : nullptr;
  if (isa == "avx2") return has_avx2() ? &avx2::kTable : nullptr;
#endif
  return isa == "portable" ? &portable::kTable : nullptr;
}

const Kernels& choose() {
  const char* forced = std::getenv("XPRESS_CPU_ISA");
  if (forced != nullptr && *forced != '\0') {
    const std::string isa = forced;
    if (isa != "avx512" && isa != "avx2" && isa != "portable") {
      throw std::invalid_argument("XPRESS_CPU_ISA is '" + isa +
                                  "'; expected avx512, avx2 or portable, or leave it unset");
    }
    if (const Kernels* table = table_of(isa)) return *table;
    throw std::invalid_argument("XPRESS_CPU_ISA is '" + isa +
                                "', which this CPU does not support; leave it unset to use the "
                                "best that it does");
  }
  for (const char* isa : {"avx512", "avx2"}) {
    if (const Kernels* table = table_of(isa)) return *table;
  }
  return portable::kTable;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* isa_name() { return kernels().isa; }

int64_t jacobi_workspace_bytes(int64_t N, int64_t B, int64_t H, int64_t r, int64_t m, int64_t top_c,
                               bool exact) {
  return JacobiWorkspace(nullptr, {N, B, H, r, m, top_c, exact}).bytes;
}

}  // namespace xpress::cpu
