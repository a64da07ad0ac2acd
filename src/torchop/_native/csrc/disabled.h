// disabled.h: count the `with torchop.native.disabled():` blocks that are currently active. In
// these blocks, all calls go through the dispatcher.
#pragma once

#include "thread.h"

namespace torchop {

// The number of open blocks in all threads. While it is 0, calls need not look up their thread.
inline std::atomic<int> disabled_blocks{0};

// Returns the number of open blocks in this thread, or, in a thread of the autograd engine, in the
// thread that called `backward()`.
inline long open_here() {
  PyObject* count = get_obj_in_tls("torchop_blocks");
  return count == nullptr ? 0 : PyLong_AsLong(count);
}

inline bool is_disabled() {
  return C10_UNLIKELY(disabled_blocks.load(std::memory_order_relaxed) != 0) && open_here() > 0;
}

// Opens `by` blocks in this thread, or closes blocks if `by` is negative.
inline void change_blocks(int by) {
  // Each thread stores the number of its open blocks as a Python object. When the thread ends,
  // PyTorch acquires the GIL to free this object, which would abort the process during finalization
  // of the interpreter. So if no blocks are open, store an object that all threads share and that
  // is never freed.
  static const auto& none = *new SafeObject(make_safe_object(PyLong_FromLong(0)));
  disabled_blocks += by;
  const long open = std::max(open_here() + by, 0L);
  stash_obj_in_tls("torchop_blocks", open == 0 ? none : make_safe_object(PyLong_FromLong(open)));
}

} // namespace torchop
