#include "emulator/fiber.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace xpress::emulator {

namespace {

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// AddressSanitizer keeps books on the stack and must be told of each switch.
void before_switch([[maybe_unused]] void** sanitizer_stack, [[maybe_unused]] const void* bottom,
                   [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(sanitizer_stack, bottom, bytes);
#endif
}

void after_switch([[maybe_unused]] void* sanitizer_stack) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(sanitizer_stack, nullptr, nullptr);
#endif
}

}  // namespace

FencedMemory::FencedMemory(size_t bytes) {
  const size_t page = page_bytes(), inside = (bytes + page - 1) / page * page;
  void* pages = mmap(nullptr, inside + 2 * page, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  begin_ = static_cast<char*>(pages) + page;
  end_ = begin_ + inside;
  set_closed(false);
#ifdef __SANITIZE_ADDRESS__
  // Its books may still hold what was here before.
  __asan_unpoison_memory_region(pages, inside + 2 * page);
#endif
}

FencedMemory::~FencedMemory() {
  munmap(begin_ - page_bytes(), static_cast<size_t>(end_ - begin_) + 2 * page_bytes());
}

bool FencedMemory::is_near(const void* address) const {
  const char* at = static_cast<const char*>(address);
  return at >= begin_ - page_bytes() && at < end_ + page_bytes();
}

void FencedMemory::set_closed(bool closed) {
  const int access = closed ? PROT_NONE : PROT_READ | PROT_WRITE;
  if (begin_ < end_ && mprotect(begin_, static_cast<size_t>(end_ - begin_), access) != 0) {
    throw std::bad_alloc();
  }
}

Context::Context() : has_begun_(true), stack_bottom_(nullptr), stack_bytes_(0) {
#ifdef __SANITIZE_ADDRESS__
  pthread_attr_t attributes;
  void* bottom = nullptr;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &bottom, &stack_bytes_);
  pthread_attr_destroy(&attributes);
  stack_bottom_ = bottom;
#endif
}

Context::Context(void (*entry)(), const FencedMemory& stack, int index)
    : has_begun_(false),
      stack_bottom_(stack.begin()),
      stack_bytes_(static_cast<size_t>(stack.end() - stack.begin())) {
  // Stacks begin at different places of their pages: otherwise the parts in use of all of them
  // would compete for the same lines of the cache.
  constexpr int kPlaces = 32, kPlaceBytes = 128;
  stack_bytes_ -= static_cast<size_t>(index % kPlaces * kPlaceBytes);
  getcontext(&first_);
  first_.uc_stack.ss_sp = stack.begin();
  first_.uc_stack.ss_size = stack_bytes_;
  first_.uc_link = nullptr;
  makecontext(&first_, entry, 0);
}

// ucontext makes the first entry into a new stack; later switches are plain jumps, since
// swapcontext calls the kernel each time.
void Context::switch_to(Context* from, Context* to) {
  before_switch(&from->sanitizer_stack_, to->stack_bottom_, to->stack_bytes_);
  if (_setjmp(from->place_) == 0) {
    if (to->has_begun_) _longjmp(to->place_, 1);
    to->has_begun_ = true;
    setcontext(&to->first_);
  }
  after_switch(from->sanitizer_stack_);
}

void Context::enter() { after_switch(nullptr); }

void Context::escape_to(Context* to) {
  before_switch(nullptr, to->stack_bottom_, to->stack_bytes_);
  _longjmp(to->place_, 1);
}

}  // namespace xpress::emulator
