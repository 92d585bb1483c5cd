// Work over torch's own thread pool. csrc/cpu does not know torch: csrc/ops defines run_on_pool.
#pragma once

#include <cstdint>

#include "vec.h"

namespace xpress::cpu {

// Calls body(context) at least once, and at most once on each thread of the pool, never on more
// than max_threads threads; returns when all calls have returned. body must not throw.
void run_on_pool(int64_t max_threads, void (*body)(void*), void* context);

namespace XPRESS_CPU_NAMESPACE {

// f(i) for every i in [0, n), each on some thread; the next free thread takes the next item, so a
// core that another process slows down does not hold up the rest. Results may not depend on order.
template <class F>
static void parallel_items(int64_t n, const F& f) {
  struct Shared {
    const F* f;
    int64_t n;
    int64_t next;
  } shared{&f, n, 0};
  if (n <= 0) return;
  auto body = [](void* context) {
    Shared* s = static_cast<Shared*>(context);
    for (;;) {
      const int64_t i = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
      if (i >= s->n) return;
      (*s->f)(i);
    }
  };
  if (n == 1) {
    body(&shared);
  } else {
    run_on_pool(n, body, &shared);
  }
}

}  // namespace XPRESS_CPU_NAMESPACE
}  // namespace xpress::cpu
