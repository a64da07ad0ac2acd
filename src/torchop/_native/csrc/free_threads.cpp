#include "free_threads.h"

#ifdef Py_GIL_DISABLED

#include <pthread.h>
#include <sched.h>

#include <mutex>
#include <vector>

namespace torchop {

namespace {

struct Threads {
  // Guards all members, and the arrays in all Thread objects. Must not be held while Python runs.
  std::mutex mutex;
  std::vector<Thread*> all;
  std::vector<PyObject*> plans; // replaced plans that calls may still be using; owned
  size_t count = 0;             // the number of threads that were ever added to `all`
};

Threads& threads() {
  // Hold the mutex during a fork, because the child needs a consistent copy of the data. The child
  // has just the thread that called fork, so remove all others.
  static auto* made = [] {
    pthread_atfork(
        [] { threads().mutex.lock(); },
        [] { threads().mutex.unlock(); },
        [] {
          threads().all.clear();
          if (thread.capacity != 0)
            threads().all.push_back(&thread);
          threads().mutex.unlock();
        });
    return new Threads();
  }();
  return *made;
}

// Returns whether a running call uses the plan. The caller must hold the mutex.
bool is_in_use(PyObject* plan) {
  for (const Thread* each : threads().all) {
    for (size_t call = 0; call < each->capacity; ++call) {
      if (each->plans[call].load() == plan)
        return true;
    }
  }
  return false;
}

// Removes a thread from `Threads::all` when the thread ends.
struct Registered {
  ~Registered() {
    const std::lock_guard<std::mutex> lock(threads().mutex);
    std::erase(threads().all, &thread);
    std::free(thread.running);
    delete[] thread.plans;
    thread.running = nullptr;
    thread.plans = nullptr;
    thread.count = thread.capacity = 0;
  }
};

} // namespace

bool reserve_call(Thread& here) {
  static thread_local Registered until_thread_ends;
  (void)&until_thread_ends;
  const size_t capacity = std::max<size_t>(16, 2 * here.capacity);
  const std::lock_guard<std::mutex> lock(threads().mutex);
  auto* plans = new (std::nothrow) std::atomic<PyObject*>[capacity]();
  void* running =
      plans == nullptr ? nullptr : std::realloc(here.running, capacity * sizeof(PyObject*));
  if (running == nullptr) {
    delete[] plans;
    return false;
  }
  for (size_t call = 0; call < here.capacity; ++call)
    plans[call].store(here.plans[call].load());
  if (here.capacity == 0) {
    here.number = threads().count++;
    threads().all.push_back(&here);
  }
  delete[] here.plans;
  here.plans = plans;
  here.running = static_cast<PyObject**>(running);
  here.capacity = capacity;
  return true;
}

void end_earlier_call(Thread& here, PyObject* entry, PyObject* plan) {
  const std::lock_guard<std::mutex> lock(threads().mutex);
  for (size_t call = here.count; call-- > 0;) {
    if (here.running[call] != entry || here.plans[call].load() != plan)
      continue;
    --here.count;
    for (; call < here.count; ++call) {
      here.running[call] = here.running[call + 1];
      here.plans[call].store(here.plans[call + 1].load());
    }
    here.plans[here.count].store(nullptr);
    return;
  }
}

void free_plans() {
  std::vector<PyObject*> unused;
  {
    const std::lock_guard<std::mutex> lock(threads().mutex);
    std::erase_if(threads().plans, [&](PyObject* plan) {
      if (is_in_use(plan))
        return false;
      unused.push_back(plan);
      return true;
    });
    plans_to_free.store(threads().plans.size());
  }
  for (PyObject* plan : unused)
    Py_DECREF(plan); // may run Python code, so the mutex was released before
}

void release_plan(PyObject* plan) {
  if (plan == nullptr)
    return;
  {
    const std::lock_guard<std::mutex> lock(threads().mutex);
    threads().plans.push_back(plan);
  }
  free_plans();
}

PyObject* new_reference(const PlanPointer& plan) {
  // While we hold the mutex, `free_plans` cannot free the plan before we take the reference.
  const std::lock_guard<std::mutex> lock(threads().mutex);
  return Py_XNewRef(plan.load());
}

void make_immortal(Thread& here, PyObject* callee) {
  here.calls_until_check = Thread::interval;
  if (callee->ob_ref_local == UINT32_MAX || callee->ob_tid == _Py_ThreadId())
    return;
  // Abuse PyUnstable_GC_VisitObjects to stop all other threads, because they must not modify the
  // object's reference count while we set these fields. The callback returns 0, so the visit ends
  // after one object.
  PyUnstable_GC_VisitObjects(
      [](PyObject*, void* argument) {
        auto* object = static_cast<PyObject*>(argument);
        __atomic_store_n(&object->ob_tid, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&object->ob_ref_shared, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&object->ob_ref_local, UINT32_MAX, __ATOMIC_RELAXED);
        return 0;
      },
      callee);
}

void wait_for_table_reads() {
  const std::lock_guard<std::mutex> lock(threads().mutex);
  for (const Thread* each : threads().all) {
    while (each->reads_table.load()) // reads are short and never block
      sched_yield();
  }
}

} // namespace torchop

#endif
