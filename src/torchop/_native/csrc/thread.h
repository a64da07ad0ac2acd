// thread.h: what native calls know of the thread that they are in.
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

struct Thread {
  // The entries of the native calls that have not returned. They are not on the C stack: a greenlet
  // that is switched to inside a kernel overwrites that, and calls then end in any order.
  PyObject** running = nullptr;
  size_t count = 0;
  size_t capacity = 0;
#ifdef Py_GIL_DISABLED
  // The plans that these calls follow, for other threads, which must not free them. Nobody but this
  // thread writes them.
  std::atomic<PyObject*>* plans = nullptr;
  std::atomic<bool> reads_table = false; // into a table of the dispatcher
  size_t number = 0;                     // of the thread, among those that make calls
  // How many objects are called until one is looked at: a prime, so that all of a call have a turn.
  static constexpr uint32_t interval = 65521;
  uint32_t calls_until_check = interval;
#endif

  // The lowest address of the stack, and how much of it is left to whoever is called. Before the
  // first call, all of memory is, so that call looks closer.
  uintptr_t stack_end = 0;
  uintptr_t stack_reserve = ~uintptr_t{0};
};

inline thread_local Thread thread;

// What a thread carries under a name, and others in which PyTorch runs a part of its work, such as
// its backward on an accelerator; borrowed, nullptr if there is nothing. Names of at most 15
// characters need no memory.
inline PyObject* get_obj_in_tls(const char* name) {
  using at::impl::ThreadLocalPythonObjects;
  return ThreadLocalPythonObjects::contains(name)
      ? ThreadLocalPythonObjects::get(name)->ptr(getPyInterpreter())
      : nullptr;
}

using SafeObject = std::shared_ptr<c10::SafePyObject>;

// Takes the object.
inline SafeObject make_safe_object(PyObject* object) {
  return std::make_shared<c10::SafePyObject>(object, getPyInterpreter());
}

inline void stash_obj_in_tls(const char* name, SafeObject object) {
  at::impl::ThreadLocalPythonObjects::set(name, std::move(object));
}

// To be looked up once in a function: that is a call, and the compiler, which takes it for none,
// would look again at every use.
inline Thread& this_thread() {
  Thread* here = &thread;
  asm("" : "+r"(here));
  return *here;
}

#ifdef Py_GIL_DISABLED

// Makes room for another call; false if there is no memory.
__attribute__((noinline, cold)) bool reserve_call(Thread& here);

// Takes a call out that is not the last: a greenlet was switched to inside a kernel.
__attribute__((noinline, cold)) void end_earlier_call(
    Thread& here, PyObject* entry, PyObject* plan);

#else

// Makes room for another call; false if there is no memory.
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

// Marks an operator as being called. Whoever wants to destroy it asks, as it does not find a frame
// of torch.ops on the stack. There must be room.
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
  // Calls of one operator are all alike, so it is the same which of them is taken out.
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

// Finds out where the stack of this thread ends. Where that cannot be told, it never does.
inline void measure_stack(Thread& here) {
  // What a kernel calls is not measured: PyTorch, NumPy, the import of a module.
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

// Whether so little is left of the stack that a call might overflow it. The interpreter counts the
// frames of Python alone, and whoever raises its limit gets no error but the end of the process.
inline bool is_stack_low(Thread& here) {
  const auto address = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  // One comparison: a stack of somebody else's, below or above this one, is never low.
  if (C10_LIKELY(address - here.stack_end >= here.stack_reserve))
    return false;
  if (here.stack_end == 0 && here.stack_reserve != 0)
    measure_stack(here);
  return address - here.stack_end < here.stack_reserve;
}

} // namespace torchop
