// thread.h: the limits of a thread's stack, and the objects that PyTorch stores for a thread.
#pragma once

#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/macros/Macros.h>
#include <torch/csrc/PyInterpreter.h>

namespace torchop {

struct Thread {
#ifdef Py_GIL_DISABLED
  size_t number =
      0; // selects the thread's part of Counters, counting from 1; 0 before its first use
  // `note_call` (free_threads.h) samples one call out of this many. The number is prime, so that a
  // program that repeats a fixed sequence of calls does not get the same call sampled every time.
  static constexpr uint32_t interval = 65521;
  uint32_t calls_until_check = interval;
#endif

  // The lowest address of the stack, and the number of bytes above it that must stay free. The
  // initial values make `is_stack_low` measure the stack in the thread's first call.
  uintptr_t stack_end = 0;
  uintptr_t stack_reserve = ~uintptr_t{0};
};

inline thread_local Thread thread;

// Returns the object (borrowed) stored under `name` in PyTorch's ThreadLocalPythonObjects, or
// nullptr. PyTorch copies these objects to the threads of the autograd engine. Names should have at
// most 15 characters, so that std::string needs no allocation.
inline PyObject* get_obj_in_tls(const char* name) {
  using at::impl::ThreadLocalPythonObjects;
  return ThreadLocalPythonObjects::contains(name)
      ? ThreadLocalPythonObjects::get(name)->ptr(getPyInterpreter())
      : nullptr;
}

using SafeObject = std::shared_ptr<c10::SafePyObject>;

// Wraps an object for `stash_obj_in_tls`. Steals the reference.
inline SafeObject make_safe_object(PyObject* object) {
  return std::make_shared<c10::SafePyObject>(object, getPyInterpreter());
}

inline void stash_obj_in_tls(const char* name, SafeObject object) {
  at::impl::ThreadLocalPythonObjects::set(name, std::move(object));
}

// Call this only once per operator call and pass the reference on, because in a shared library each
// access to a thread_local variable calls __tls_get_addr. The asm statement hides the origin of the
// address from the compiler, which could otherwise compute it again at each use.
inline Thread& this_thread() {
  Thread* here = &thread;
  asm("" : "+r"(here));
  return *here;
}

// Determines the limits of this thread's stack. If they are unknown, disables `is_stack_low`.
inline void measure_stack(Thread& here) {
  // Kernels call C code that does not check the stack itself, such as PyTorch and NumPy, so reserve
  // this many bytes for it.
  constexpr uintptr_t reserve = 512 * 1024;
  uintptr_t end = 0, size = 0;
#if defined(__linux__)
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
    void* lowest;
    size_t bytes;
    if (pthread_attr_getstack(&attributes, &lowest, &bytes) == 0) {
      end = reinterpret_cast<uintptr_t>(lowest);
      size = bytes;
    }
    pthread_attr_destroy(&attributes);
  }
#elif defined(__APPLE__)
  size = pthread_get_stacksize_np(pthread_self());
  end = reinterpret_cast<uintptr_t>(pthread_get_stackaddr_np(pthread_self())) - size;
#endif
  here.stack_end = end;
  here.stack_reserve = std::min(reserve, size / 4);
}

// Returns whether the stack might overflow in this call. CPython only limits the number of Python
// frames, so without this check, deep recursion could crash a program that raises the recursion
// limit.
inline bool is_stack_low(Thread& here) {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  // A greenlet has its own stack, so `address` may be below `stack_end`. The unsigned difference
  // then wraps around to a large number, and this function returns false.
  if (C10_LIKELY(address - here.stack_end >= here.stack_reserve))
    return false;
  if (here.stack_end == 0 && here.stack_reserve != 0)
    measure_stack(here);
  return address - here.stack_end < here.stack_reserve;
}

} // namespace torchop
