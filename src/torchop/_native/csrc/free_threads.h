// free_threads.h: what calls need where Python has no lock and many threads run at once.
//
// With the lock, whoever reads a pointer has the object behind it until Python runs again, and most
// of this is empty. Without it, a call announces in memory of its own what it is about to use, and
// looks again whether that still holds; whoever replaces it waits, or leaves freeing it to the last
// call. No counter is shared by all calls, which would wait for one another's processor to write
// it.
#pragma once

#include <Python.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

#include "reasons.h"
#include "thread.h"

#ifndef Py_BEGIN_CRITICAL_SECTION // before 3.13
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#endif

namespace torchop {

// The plan of an operator, which calls read and registrations replace.
using PlanPointer = std::atomic<PyObject*>;

#ifdef Py_GIL_DISABLED

inline constexpr bool has_gil = false;

// Gives up a reference to a plan that nobody can find any more: now, or when no call follows it.
void release_plan(PyObject* plan);

// A new reference to a plan; nullptr if there is none.
PyObject* new_reference(const PlanPointer& plan);

// How many plans wait for the last call that follows them.
inline std::atomic<size_t> plans_to_free = 0;

// Frees those that no call follows any more.
void free_plans();

// Announces that a thread looks into the dispatcher's table of an operator.
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

// Waits until no thread looks any more into a table of which it was just said that it goes.
void wait_for_table_reads();

// Has Python count no references to an object any more if other threads than its own call it.
__attribute__((noinline, cold)) void make_immortal(Thread& here, PyObject* callee);

// Says that an object is called. Threads that call one wait for each other to count the references
// to it. So what they call often, of which this sees a few calls, is made immortal, as the
// functions of modules are there.
inline void note_call(PyObject* callee) {
  Thread& here = this_thread();
  if (C10_UNLIKELY(--here.calls_until_check == 0))
    make_immortal(here, callee);
}

// Calls by the reason for which they went to the dispatcher, in as many places as threads write.
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
      return; // there is no memory for it, and the call is right without
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
    delete made; // another thread was first
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
