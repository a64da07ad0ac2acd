// thread.h: per-thread state of native calls: running calls, stack limits, and objects that PyTorch
// propagates.
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

// The state of one thread. Written by that thread only. Without the GIL, other threads read `plans`
// and `reads_table`.
struct Thread {
  // A stack of the entries (borrowed) of running native calls. On the heap, because a greenlet
  // switch inside a kernel overwrites the C stack. Greenlets may also end calls in any order.
  PyObject** running = nullptr;
  // Number of running calls, and allocated size of the arrays.
  size_t count = 0;
  size_t capacity = 0;
#ifdef Py_GIL_DISABLED
  // The plans of these calls. Registrations read them, and do not free a plan that is in use.
  std::atomic<PyObject*>* plans = nullptr;
  std::atomic<bool> reads_table = false; // this thread is reading a dispatcher table, see TableRead
  size_t number = 0;                     // index of the thread, for Counters
  // `note_call` samples one in this many calls. Prime, so that a program which repeats a fixed
  // sequence of callees has each of them sampled.
  static constexpr uint32_t interval = 65521;
  uint32_t calls_until_check = interval;
#endif

  // The lowest address of the stack, and the number of bytes above it to leave free. The initial
  // values make the first call measure the stack.
  uintptr_t stack_end = 0;
  uintptr_t stack_reserve = ~uintptr_t{0};
};

inline thread_local Thread thread;

// Returns an object that was stored under a name in ThreadLocalPythonObjects (borrowed), or
// nullptr. PyTorch propagates these objects to threads that work for this one, such as the engine's
// threads for accelerators. A key of at most 15 characters avoids an allocation.
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

// Returns the thread's state. Call it once per function: with `-fPIC`, each access of a
// thread_local variable calls __tls_get_addr. The asm keeps the compiler from recomputing the
// address.
inline Thread& this_thread() {
  Thread* here = &thread;
  asm("" : "+r"(here));
  return *here;
}

#ifdef Py_GIL_DISABLED

// Grows the arrays for another running call. Returns false without an exception if out of memory.
__attribute__((noinline, cold)) bool reserve_call(Thread& here);

// Removes a call that is not the last one, because a greenlet switch reordered the calls.
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

// Marks an operator as running in this thread for the lifetime of the object. Deregistering an
// operator checks this: native calls have no Python frame that it could find. Requires count <
// capacity.
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
  // Removes a call that is not the last one, because a greenlet switch reordered the calls. Any
  // call of this entry will do, because they are indistinguishable.
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

// Sets the stack limits of this thread. If they are unknown, disables the check.
inline void measure_stack(Thread& here) {
  // Left for C code that kernels call and that does not check the stack: PyTorch, NumPy, module
  // imports.
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

// Returns whether the stack may overflow in this call. CPython limits the number of Python frames
// only, and programs that raise the recursion limit would crash instead of raising RecursionError.
inline bool is_stack_low(Thread& here) {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  // Unsigned, so the stack of another thread (such as a greenlet's) also compares as large enough.
  if (C10_LIKELY(address - here.stack_end >= here.stack_reserve))
    return false;
  if (here.stack_end == 0 && here.stack_reserve != 0)
    measure_stack(here);
  return address - here.stack_end < here.stack_reserve;
}

} // namespace torchop
