// Fibers: threads of execution that run one at a time, each on a stack of its own, and hand over to
// one another. And the memory that stacks and shared memory lie in, fenced by inaccessible pages.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace xpress::emulator {

// Whole pages of memory with an inaccessible page before and after them.
class FencedMemory {
 public:
  explicit FencedMemory(size_t bytes);
  ~FencedMemory();
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;

  char* begin() const { return begin_; }
  char* end() const { return end_; }
  // Whether the address lies in the memory or on its fences.
  bool is_near(const void* address) const;
  // While closed, every access is as one to the fences.
  void set_closed(bool closed);

 private:
  char* begin_;
  char* end_;
};

// Where a fiber goes on when it is switched to.
class Context {
 public:
  // The thread that calls this, on the stack that it has.
  Context();
  // A fiber that begins with `entry`, which must not return. `index` tells fibers apart.
  Context(void (*entry)(), const FencedMemory& stack, int index);

  // Leaves `from`, in which the caller runs, for `to`; returns when someone switches back.
  static void switch_to(Context* from, Context* to);
  // A fiber's first act.
  static void enter();
  // Goes on in `to` from a signal handler; what was running is never returned to.
  [[noreturn]] static void escape_to(Context* to);

 private:
  ucontext_t first_;  // of a fiber that has not begun
  jmp_buf place_;
  bool has_begun_;
  const void* stack_bottom_;
  size_t stack_bytes_;
  void* sanitizer_stack_ = nullptr;
};

}  // namespace xpress::emulator
