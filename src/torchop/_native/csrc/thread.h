// thread.h: thread-local state of native calls.
#pragma once

#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/macros/Macros.h>
#include <torch/csrc/PyInterpreter.h>

namespace torchop {

// Per-thread state. Only the owning thread writes it. Without the GIL, other threads read `plans`
// and `reads_table`.
struct Thread {
  // The entries (borrowed) of the native calls that are running, innermost last. They are not on
  // the C stack, because a greenlet switch inside a kernel replaces the stack. Calls that run in
  // several greenlets may return in any order.
  PyObject** running = nullptr;
  // The number of running calls, and the size of the arrays.
  size_t count = 0;
  size_t capacity = 0;
#ifdef Py_GIL_DISABLED
  // The plans of these calls: hazard pointers, see free_threads.h.
  std::atomic<PyObject*>* plans = nullptr;
  std::atomic<bool> reads_table = false; // see TableRead
  size_t number = 0;                     // index of the thread, for Counters
  // `note_call` samples one in this many calls. The number is prime, because many programs repeat a
  // sequence of calls, and each call in the sequence must be sampled at some time.
  static constexpr uint32_t interval = 65521;
  uint32_t calls_until_check = interval;
#endif

  // The lowest address of the stack, and the number of bytes to leave free. With the initial
  // values, the first call measures the stack.
  uintptr_t stack_end = 0;
  uintptr_t stack_reserve = ~uintptr_t{0};
};

inline thread_local Thread thread;

// Returns an object in ThreadLocalPythonObjects (borrowed), or nullptr. PyTorch propagates these
// objects to the threads of the autograd engine. Names of at most 15 characters need no allocation.
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

// Returns the state of this thread. With `-fPIC`, each access to a thread_local variable calls
// __tls_get_addr, so call this function only once. The asm keeps the compiler from computing the
// address again.
inline Thread& this_thread() {
  Thread* here = &thread;
  asm("" : "+r"(here));
  return *here;
}

#ifdef Py_GIL_DISABLED

// Grows the arrays for another running call. Returns false without an exception if out of memory.
__attribute__((noinline, cold)) bool reserve_call(Thread& here);

// Removes a call that is not the last in the array, because a greenlet switch reordered the calls.
__attribute__((noinline, cold)) void end_earlier_call(
    Thread& here, PyObject* entry, PyObject* plan);

#else

// Grows the array for another running call. Returns false without an exception if out of memory.
__attribute__((noinline, cold)) inline bool reserve_call(Thread& here) {
  struct Freed {
    ~Freed() {
      std::free(thread.running);
      thread.running = nullptr;
      thread.count = thread.capacity = 0;
    }
  };
  static thread_local Freed when_thread_ends;
  (void)&when_thread_ends;
  const size_t capacity = std::max<size_t>(16, 2 * here.capacity);
  void* memory = std::realloc(here.running, capacity * sizeof(PyObject*));
  if (memory == nullptr)
    return false;
  here.running = static_cast<PyObject**>(memory);
  here.capacity = capacity;
  return true;
}

// RAII guard that marks an operator as running on this thread. It is needed because a kernel must
// not deregister its own operator, but native calls leave no Python frame from which to detect
// this. Requires count < capacity.
class RunningCall {
 public:
  RunningCall(Thread& here, PyObject* entry) : thread_(here), entry_(entry) {
    here.running[here.count++] = entry;
  }
  ~RunningCall() {
    if (C10_LIKELY(thread_.count != 0 && thread_.running[thread_.count - 1] == entry_))
      --thread_.count;
    else
      remove();
  }
  RunningCall(const RunningCall&) = delete;
  RunningCall& operator=(const RunningCall&) = delete;

 private:
  // Removes a call that is not the last in the array, because of a greenlet switch. Removes any
  // call with this entry, because such calls are indistinguishable.
  __attribute__((noinline, cold)) void remove() {
    PyObject** end = thread_.running + thread_.count;
    PyObject** call = std::find(thread_.running, end, entry_);
    if (call == end)
      return;
    std::copy(call + 1, end, call);
    --thread_.count;
  }

  Thread& thread_;
  PyObject* entry_;
};

#endif

// Sets the stack limits of this thread. Disables the check if they are unknown.
inline void measure_stack(Thread& here) {
  // The space for C code that kernels call, such as PyTorch and NumPy, and that does not check the
  // stack.
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

// Returns whether the stack may overflow in this call. CPython limits only the number of Python
// frames, so a program that raises the recursion limit would crash.
inline bool is_stack_low(Thread& here) {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  // The difference is unsigned, so it is large for a greenlet, which has its stack elsewhere.
  if (C10_LIKELY(address - here.stack_end >= here.stack_reserve))
    return false;
  if (here.stack_end == 0 && here.stack_reserve != 0)
    measure_stack(here);
  return address - here.stack_end < here.stack_reserve;
}

} // namespace torchop
