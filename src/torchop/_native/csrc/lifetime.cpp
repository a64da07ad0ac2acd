#include "lifetime.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/utils/object_ptr.h>

#include "errors.h"
#include "free_threads.h"
#include "members.h"

namespace torchop {

namespace {

using std::chrono::milliseconds;

// How long to wait for a call in the dispatcher. If the call takes longer, it is probably running a
// kernel, and so has already read the table.
constexpr milliseconds timeout{1000};

// All Lifetime objects, keyed by the addresses of the operators' definitions in the dispatcher.
// This object is never destroyed, because operators can still be deregistered during process exit.
struct Lifetimes {
  std::mutex mutex; // guards `all`; must not be held while Python code runs
  std::unordered_map<const void*, LifetimePointer> all;
};

struct Call {
  Lifetime* lifetime;
  std::atomic<size_t>* number = nullptr; // the counter that counts this call, or nullptr
};

thread_local std::vector<Call> called_here;
thread_local const auto changes_here = std::make_shared<std::atomic<size_t>>(0);

size_t count_here(const std::atomic<size_t>& number) {
  return size_t(std::count_if(called_here.begin(), called_here.end(), [&](const Call& call) {
    return call.number == &number;
  }));
}

size_t inside_here(const Lifetime& lifetime) {
  return size_t(std::count_if(called_here.begin(), called_here.end(), [&](const Call& call) {
    return call.lifetime == &lifetime;
  }));
}

Lifetimes& lifetimes() {
  // A forked child has just the thread that called fork, so in the child, reset the counters to the
  // calls of this thread.
  static auto* made = [] {
    pthread_atfork(
        [] { lifetimes().mutex.lock(); },
        [] { lifetimes().mutex.unlock(); },
        [] {
          for (const auto& [_, lifetime] : lifetimes().all) {
            for (std::atomic<size_t>& number : lifetime->numbers)
              number.store(count_here(number));
            lifetime->inside.store(inside_here(*lifetime));
            lifetime->changes.store(0);
          }
          lifetimes().mutex.unlock();
        });
    return new Lifetimes();
  }();
  return *made;
}

const void* place_of(const c10::OperatorHandle& op) {
  return &*member_of(OperatorDefinition{}, op);
}

// Marks an operator as deregistered, no matter which package deregisters it.
class Listener final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    ++deregistered_operators;
    const std::lock_guard<std::mutex> lock(lifetimes().mutex);
    if (auto found = lifetimes().all.extract(place_of(op)); !found.empty()) {
      found.mapped()->exists.store(false);
      // Leak `registration`. The destructor would acquire the dispatcher's lock, which PyTorch
      // already holds when it calls this function.
      if (found.mapped().use_count() == 1 && found.mapped()->registration.has_value())
        (void)new LifetimePointer(found.mapped());
    }
#ifdef Py_GIL_DISABLED
    wait_for_table_reads();
#endif
  }
};

// The listener must exist before any call is counted, so register it when the extension is loaded.
[[maybe_unused]] const auto* const listening = new c10::RegistrationHandleRAII(
    c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));

// Releases the GIL and waits until `holds()`. Returns false if that takes longer than `limit`.
template <class Condition>
bool wait_until(milliseconds limit, Condition&& holds) {
  if (C10_LIKELY(holds()))
    return true;
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + limit;
  std::chrono::microseconds pause{20};
  PyThreadState* state = PyEval_SaveThread();
  bool is_over;
  while (!(is_over = holds()) && clock::now() < end) {
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::microseconds>(2 * pause, milliseconds{1});
  }
  PyEval_RestoreThread(state);
  return is_over;
}

bool is_awaited(const LifetimePointer& lifetime) {
  const std::atomic<size_t>& number = *lifetime->awaited.load();
  return number.load() > count_here(number);
}

void uncount(Call& call) {
  if (call.number != nullptr)
    std::exchange(call.number, nullptr)->fetch_sub(1);
}

// Counts the last `calls` calls in `called_here`. Before that, waits until no other thread is
// changing a table that these calls read.
//
// A call increments the counter and then reads `changes`. A change increments `changes` and then
// reads the counter. So at least one of them notices the other. While a call waits for a change to
// one table, it is not counted. Otherwise, the change could be waiting for this call too, because
// of another table that the call reads.
void count_last(size_t calls) {
  const auto begin = called_here.end() - std::ptrdiff_t(calls), end = called_here.end();
  const auto add = [&] {
    std::for_each(begin, end, [](Call& call) {
      call.number = call.lifetime->awaited.load();
      call.number->fetch_add(1);
    });
  };
  const auto is_changed = [](const Call& call) { return call.lifetime->changes.load() != 0; };
  const auto is_unchanged = [&] {
    add();
    if (C10_LIKELY(std::none_of(begin, end, is_changed)) || changes_here->load() != 0)
      return true;
    std::for_each(begin, end, uncount);
    return false;
  };
  if (!wait_until(2 * timeout, is_unchanged))
    add(); // don't wait any longer, because the other thread may be waiting for this one
}

// Waits until no other thread has a call to these operators in the dispatcher. After a timeout,
// makes later changes ignore the calls that are still there (see `Lifetime::awaited`).
void wait_for_calls(const std::vector<LifetimePointer>& all) {
  if (wait_until(timeout, [&] { return std::none_of(all.begin(), all.end(), is_awaited); }))
    return;
  const std::lock_guard<std::mutex> lock(lifetimes().mutex);
  for (const LifetimePointer& lifetime : all) {
    if (is_awaited(lifetime))
      lifetime->awaited.store(&lifetime->numbers.emplace_back(0));
  }
}

// The method `__enter__` of the registration lock. If it were a Python function, KeyboardInterrupt
// could interrupt it just after it has acquired the lock, and nothing would release the lock.
PyObject* enter(PyObject* lock, PyObject*) {
  static PyObject* const name = PyUnicode_InternFromString("acquire");
  PyObject* arguments[] = {lock, Py_False}; // blocking=False
  THPObjectPtr is_held(PyObject_VectorcallMethod(name, arguments, 2, nullptr));
  if (C10_LIKELY(!is_held || is_held.get() == Py_True))
    return is_held.release();
  std::for_each(called_here.begin(), called_here.end(), uncount);
  PyObject* result = PyObject_VectorcallMethod(name, arguments, 1, nullptr);
  count_last(called_here.size());
  return result;
}

// The method accepts arguments (METH_VARARGS), because contextlib.ExitStack passes the lock to it.
PyMethodDef enter_method{"__enter__", enter, METH_VARARGS, "Acquire the registration lock."};

constexpr const char* change_capsule = "torchop._native._call_path.change";

void end_change(PyObject* capsule) {
  delete static_cast<Change*>(PyCapsule_GetPointer(capsule, change_capsule));
}

} // namespace

LifetimePointer lifetime_of(const c10::OperatorHandle& op) {
  const std::lock_guard<std::mutex> lock(lifetimes().mutex);
  LifetimePointer& lifetime = lifetimes().all[place_of(op)];
  if (lifetime == nullptr)
    lifetime = std::make_shared<Lifetime>(op);
  return lifetime;
}

std::vector<LifetimePointer> lifetimes_of(PyObject* names, bool all) {
  THPObjectPtr items(PySequence_Tuple(names));
  if (!items)
    throw_python_error();
  std::vector<LifetimePointer> found;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(items.get()); ++index) {
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(items.get(), index));
    if (name == nullptr)
      throw_python_error();
    const auto op = c10::Dispatcher::singleton().findOp(torch::jit::parseName(name));
    if (!op.has_value())
      continue;
    if (all) {
      found.push_back(lifetime_of(*op));
      continue;
    }
    const std::lock_guard<std::mutex> lock(lifetimes().mutex);
    if (const auto known = lifetimes().all.find(place_of(*op)); known != lifetimes().all.end())
      found.push_back(known->second);
  }
  return found;
}

DispatcherCall::DispatcherCall(c10::ArrayRef<LifetimePointer> lifetimes)
    : lifetimes_(lifetimes.begin(), lifetimes.end()) {
  for (const LifetimePointer& lifetime : lifetimes_) {
    lifetime->inside.fetch_add(1);
    called_here.push_back(Call{lifetime.get()});
  }
  count_last(lifetimes_.size());
}

DispatcherCall::~DispatcherCall() {
  for (const LifetimePointer& lifetime : lifetimes_) {
    // This call may not be the last one in the vector, because calls on several greenlets may
    // return in any order.
    const auto last = std::find_if(called_here.rbegin(), called_here.rend(), [&](const Call& call) {
      return call.lifetime == lifetime.get();
    });
    if (last != called_here.rend()) {
      uncount(*last);
      called_here.erase(std::next(last).base());
    }
    lifetime->inside.fetch_sub(1);
  }
}

Change::Change(std::vector<LifetimePointer> lifetimes)
    : lifetimes_(std::move(lifetimes)), of_thread_(changes_here) {
  of_thread_->fetch_add(1);
  for (const LifetimePointer& lifetime : lifetimes_)
    lifetime->changes.fetch_add(1);
#ifdef Py_GIL_DISABLED
  wait_for_table_reads();
#endif
  wait_for_calls(lifetimes_);
}

Change::~Change() {
  for (const LifetimePointer& lifetime : lifetimes_)
    lifetime->changes.fetch_sub(1);
  of_thread_->fetch_sub(1);
}

PyObject* make_lock_enter(PyObject*, PyObject* lock) {
  return PyCFunction_New(&enter_method, lock);
}

PyObject* hold_calls(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  std::vector<LifetimePointer> found = lifetimes_of(names, false);
  if (found.empty())
    Py_RETURN_NONE;
  auto change = std::make_unique<Change>(std::move(found));
  PyObject* capsule = PyCapsule_New(change.get(), change_capsule, end_change);
  if (capsule != nullptr)
    change.release();
  return capsule;
  END_HANDLE_TH_ERRORS
}

PyObject* end_calls(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  const std::vector<LifetimePointer> found = lifetimes_of(names, false);
  for (const LifetimePointer& lifetime : found)
    lifetime->exists.store(false);
  wait_for_calls(found);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const LifetimePointer& lifetime : found) {
    if (lifetime->inside.load() > inside_here(*lifetime) && !lifetime->registration.has_value())
      lifetime->registration.emplace(dispatcher.registerName(lifetime->op.operator_name()));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace torchop
