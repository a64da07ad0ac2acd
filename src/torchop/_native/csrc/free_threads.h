// free_threads.h: synchronize native calls with registrations in other threads.
//
// With the GIL, a borrowed pointer stays valid until Python code runs, so most of this file is
// empty. Without the GIL, operators' call plans are protected by hazard pointers. A call publishes
// the plan in its Thread, and afterwards checks that the plan is still current. A registration
// replaces the plan, and frees the old plan when no Thread contains it any more. Plans have no
// shared reference count, because all threads that call an operator would contend for its cache
// line.
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

// An owned reference to a plan. Registrations replace it, and pass the old plan to `release_plan`.
using PlanPointer = std::atomic<PyObject*>;

#ifdef Py_GIL_DISABLED

inline constexpr bool has_gil = false;

// Releases the reference to a replaced plan when no call uses it any more. May run Python code.
void release_plan(PyObject* plan);

// Returns a new reference to the current plan, or nullptr.
PyObject* new_reference(const PlanPointer& plan);

// The number of replaced plans that running calls may still use.
inline std::atomic<size_t> plans_to_free = 0;

// Frees replaced plans that no call uses any more. May run Python code.
void free_plans();

// RAII guard that marks this thread as reading a dispatch table. The guard's scope must be short,
// because `wait_for_table_reads` spins.
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

// Waits until no thread reads a table that was marked as changing (`Lifetime::exists` or
// `Lifetime::changes`). Threads that start reading later check these members themselves.
void wait_for_table_reads();

// Makes an object immortal if other threads call it, so that its references are no longer counted.
__attribute__((noinline, cold)) void make_immortal(Thread& here, PyObject* callee);

// Called for each kernel and handle that is called. Threads that call the same object contend for
// its reference count. CPython 3.13 makes module-level functions immortal for this reason. This
// function makes an object immortal if a sampled call shows that several threads call it.
inline void note_call(PyObject* callee) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(--here.calls_until_check == 0))
    make_immortal(here, callee);
}

// Counts calls by reason. Has several parts, because threads would contend for a single cache line.
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
      return; // out of memory: do not count the call
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
    delete made; // another thread has created it
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
