// free_threads.h: keep a call plan (plan.h) alive while calls use it, because another thread may
// replace the plan at any time.
//
// With the GIL, each call owns a reference to its plan. In free-threaded Python, all threads that
// call an operator would contend for the plan's reference count. So there, calls own no reference,
// and we never free plans that were replaced.
#pragma once

#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

#include "reasons.h"
#include "thread.h"

#ifndef Py_BEGIN_CRITICAL_SECTION // not defined before Python 3.13
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

namespace torchop {

// An owned reference to a call plan. To replace the plan, exchange the pointer and pass the old
// plan to `release_plan`.
using PlanPointer = std::atomic<PyObject*>;

#ifdef Py_GIL_DISABLED

inline constexpr bool has_gil = false;

inline void release_plan(PyObject*) {} // no-op, because other threads may still use the plan

// Makes an object immortal, so that CPython stops counting references to it. No-op if this thread
// owns the object.
__attribute__((noinline, cold)) void make_immortal(Thread& here, PyObject* callee);

// Must be called whenever a kernel or handle is called. Threads that call the same object contend
// for its reference count, so we make such objects immortal, as CPython 3.13 does with module-level
// functions. To keep this cheap, we only check a sample of the calls. If one of them comes from a
// thread that does not own the object, we make the object immortal.
inline void note_call(PyObject* callee) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(--here.calls_until_check == 0))
    make_immortal(here, callee);
}

// Counts native calls, and the calls that fell back for each reason. The counts are spread over
// several parts, so that threads do not all contend for the same cache line.
class Counters {
 public:
  static constexpr size_t size() {
    return size_t(Reason::Count);
  }

  Counters() = default;
  ~Counters() {
    for (auto& part : parts_)
      delete part.load(std::memory_order_relaxed);
  }
  Counters(const Counters&) = delete;
  Counters& operator=(const Counters&) = delete;

  void count(Reason reason, Thread& here) {
    static std::atomic<size_t> threads = 0;
    if (C10_UNLIKELY(here.number == 0))
      here.number = ++threads;
    std::atomic<Part*>& place = parts_[here.number % parts_.size()];
    Part* part = place.load(std::memory_order_acquire);
    if (C10_UNLIKELY(part == nullptr) && (part = make_part(place)) == nullptr)
      return; // out of memory, so the call is not counted
    part->counts[size_t(reason)].fetch_add(1, std::memory_order_relaxed);
  }

  uint64_t operator[](size_t reason) const {
    uint64_t sum = 0;
    for (const auto& place : parts_) {
      if (const Part* part = place.load(std::memory_order_acquire))
        sum += part->counts[reason].load(std::memory_order_relaxed);
    }
    return sum;
  }

 private:
  struct alignas(64) Part {
    std::array<std::atomic<uint64_t>, size_t(Reason::Count)> counts{};
  };

  __attribute__((noinline, cold)) static Part* make_part(std::atomic<Part*>& place) {
    auto* made = new (std::nothrow) Part();
    Part* found = nullptr;
    if (made == nullptr || place.compare_exchange_strong(found, made))
      return made;
    delete made; // another thread has created the part first
    return found;
  }

  std::array<std::atomic<Part*>, 16> parts_{};
};

#else

inline constexpr bool has_gil = true;

inline void release_plan(PyObject* plan) {
  Py_XDECREF(plan);
}

inline void note_call(PyObject*) {}

class Counters {
 public:
  static constexpr size_t size() {
    return size_t(Reason::Count);
  }
  void count(Reason reason, Thread&) {
    ++counts_[size_t(reason)];
  }
  uint64_t operator[](size_t reason) const {
    return counts_[reason];
  }

 private:
  std::array<uint64_t, size_t(Reason::Count)> counts_{};
};

#endif

} // namespace torchop
