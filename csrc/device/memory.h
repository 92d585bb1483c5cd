// Global memory, asynchronous copies into shared memory, and atomics.
//
// Kernels reach global memory through these functions only. On the emulator each access is checked
// against the bounds of the tensors that the caller declared, and its bytes are counted; on the GPU
// they are plain loads and stores. Shared memory is used through ordinary pointers.
#pragma once

#include "device/language.h"
#include "device/numbers.h"

namespace xpress::device {

// 16 bytes, as one register group.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

// One element (1 to 8 bytes) or a Bytes16; the address is a multiple of its size.
template <class T>
XPRESS_DEVICE T load_global(const T* address) {
#ifdef XPRESS_EMULATE
  emulator::check_load(address, sizeof(T));
#endif
  return *address;
}

template <class T>
XPRESS_DEVICE void store_global(T* address, T value) {
#ifdef XPRESS_EMULATE
  emulator::check_store(address, sizeof(T));
#endif
  *address = value;
}

// 16 bytes that no kernel writes while this one runs, or zero, and nothing read, where they are not
// wanted; without a branch, so that several of these loads can be in flight.
XPRESS_DEVICE Bytes16 load_global_or_zero(const void* address, bool wanted) {
#ifdef XPRESS_EMULATE
  return wanted ? load_global(static_cast<const Bytes16*>(address)) : Bytes16{};
#else
  Bytes16 value;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@wanted ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(value.word[0]), "=&r"(value.word[1]), "=&r"(value.word[2]), "=&r"(value.word[3])
      : "l"(address), "r"(static_cast<int>(wanted)));
  return value;
#endif
}

// Starts to copy 16 bytes from global to shared memory; both addresses are multiples of 16. Where
// `wanted` is false nothing is read and the destination becomes zero. The bytes may be read after
// copy_async_wait() in this thread and a barrier for the others.
XPRESS_DEVICE void copy_async_16(void* shared, const void* global, bool wanted = true) {
#ifdef XPRESS_EMULATE
  emulator::copy_async(shared, global, 16, wanted);
#else
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(bytes)
               : "memory");
#endif
}

// Closes a group of the copies that this thread has started since the last group.
XPRESS_DEVICE void copy_async_commit() {
#ifdef XPRESS_EMULATE
  emulator::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `kPending` of this thread's groups are unfinished, the newest ones.
template <int kPending>
XPRESS_DEVICE void copy_async_wait() {
#ifdef XPRESS_EMULATE
  emulator::copy_async_wait(kPending);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// *address = max(*address, value); global memory.
XPRESS_DEVICE void atomic_max(uint64_t* address, uint64_t value) {
#ifdef XPRESS_EMULATE
  emulator::check_atomic(address, sizeof(uint64_t));
  if (value > *address) *address = value;
#else
  atomicMax(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
#endif
}

// Adds to a counter in shared memory, of this CTA or of one of its cluster; returns what was there.
XPRESS_DEVICE uint32_t atomic_add_shared(uint32_t* address, uint32_t value) {
#ifdef XPRESS_EMULATE
  const uint32_t before = *address;
  *address = before + value;
  emulator::maybe_switch();
  return before;
#else
  return atomicAdd(address, value);
#endif
}

// Adds to a counter in global memory and returns what was there. Acquire and release: what this
// thread wrote before is seen by whoever sees the sum by an acquire, and the other way round.
XPRESS_DEVICE uint32_t atomic_add_acquire_release(uint32_t* address, uint32_t value) {
#ifdef XPRESS_EMULATE
  emulator::check_atomic(address, sizeof(uint32_t));
  const uint32_t before = *address;
  *address = before + value;
  emulator::maybe_switch();
  return before;
#else
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
#endif
}

XPRESS_DEVICE uint32_t load_acquire(const uint32_t* address) {
#ifdef XPRESS_EMULATE
  emulator::spin();
  return load_global(address);
#else
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#endif
}

}  // namespace xpress::device
