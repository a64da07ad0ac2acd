// thread.h: what native calls know of the thread that they are in.
#pragma once

#include <Python.h>

namespace torchop {

// A native call that has not returned; the innermost one first.
struct Running {
  PyObject* entry;
  const Running* outer;
};

struct Thread {
  int switched_off = 0; // calls go to the dispatcher while it is positive
  const Running* running = nullptr;
};

inline thread_local Thread thread;

// Marks an operator as being called. Whoever wants to destroy it asks, as it does not find a frame
// of torch.ops on the stack.
class Mark {
 public:
  explicit Mark(PyObject* entry) : thread_(thread), running_{entry, thread_.running} {
    thread_.running = &running_;
  }
  ~Mark() {
    thread_.running = running_.outer;
  }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;

 private:
  Thread& thread_; // looked up once: that is a call
  Running running_;
};

} // namespace torchop
