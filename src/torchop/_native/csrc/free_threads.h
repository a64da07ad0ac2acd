// free_threads.h: keep a call plan (plan.h) alive while calls use it, because another thread may
// replace the plan at any time.
//
// With the GIL, a borrowed pointer stays valid until Python code runs, so there is little to do. In
// free-threaded Python, hazard pointers protect an operator's plan. A call stores a pointer to the
// plan in the Thread object, and then checks that the plan is still current. A registration
// replaces the plan, and frees the old plan once no Thread points to it. We do not count references
// to plans, because all threads that call an operator would contend for the cache line of the
// count.
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

// Releases the reference to a replaced plan as soon as no call uses the plan. May run Python code.
void release_plan(PyObject* plan);

PyObject* new_reference(const PlanPointer& plan);

// The number of replaced plans that running calls may still use.
inline std::atomic<size_t> plans_to_free = 0;

// Frees the replaced plans that no call uses any longer. May run Python code.
void free_plans();

// RAII guard that marks this thread as reading a dispatch table. `wait_for_table_reads`
// spins until the guard is destroyed, so destroy it soon.
class TableRead {
 public:
  explicit TableRead(Thread& here) : thread_(here) {
    thread_.reads_table.store(true);
  }
  ~TableRead() {
    thread_.reads_table.store(false, std::memory_order_release);
  }
  TableRead(const TableRead&) = delete;
  TableRead& operator=(const TableRead&) = delete;

 private:
  Thread& thread_;
};

// Waits until no thread reads a dispatch table. Before calling this function, mark the table as
// changing by setting `Lifetime::exists` or `Lifetime::changes`. Threads that start to read later
// check these members and do not read the table.
void wait_for_table_reads();

// Makes an object immortal, so that CPython no longer counts references to it, unless this thread
// owns the object.
__attribute__((noinline, cold)) void make_immortal(Thread& here, PyObject* callee);

// Must be called whenever a kernel or handle is called. Threads that call the same object contend
// for its reference count, so we make such objects immortal, as CPython 3.13 does with module-level
// functions. To be fast, looks at only a sample of the calls, and makes the object immortal if one
// of them comes from a thread other than the owner.
inline void note_call(PyObject* callee) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(--here.calls_until_check == 0))
    make_immortal(here, callee);
}

// Counts native calls, and calls that fell back for each reason. The counts are distributed over
// several parts, because otherwise all threads would contend for one cache line.
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

  void count(Reason reason, const Thread& here) {
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

inline PyObject* new_reference(const PlanPointer& plan) {
  return Py_XNewRef(plan.load(std::memory_order_relaxed));
}

class Counters {
 public:
  static constexpr size_t size() {
    return size_t(Reason::Count);
  }
  void count(Reason reason, const Thread&) {
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
