// disabled.h: the state of `torchop.native.disabled()` blocks.
#pragma once

#include "thread.h"

namespace torchop {

// The number of open `disabled()` blocks in all threads. If it is 0, calls need no thread-local
// lookup.
inline std::atomic<int> disabled_blocks{0};

// Returns the number of open blocks in this thread. In a thread of the autograd engine, returns the
// number for the thread that called `backward()`.
inline long open_here() {
  PyObject* count = get_obj_in_tls("torchop_blocks");
  return count == nullptr ? 0 : PyLong_AsLong(count);
}

inline bool is_disabled() {
  return C10_UNLIKELY(disabled_blocks.load(std::memory_order_relaxed) != 0) && open_here() > 0;
}

// Opens this many blocks, or closes blocks if the number is negative.
inline void change_blocks(int by) {
  // When a thread ends, PyTorch acquires the GIL to free this object, which would abort the process
  // during the interpreter's finalization. So 0 is a shared object that is never freed.
  static const auto& none = *new SafeObject(make_safe_object(PyLong_FromLong(0)));
  disabled_blocks += by;
  const long open = std::max(open_here() + by, 0L);
  stash_obj_in_tls("torchop_blocks", open == 0 ? none : make_safe_object(PyLong_FromLong(open)));
}

} // namespace torchop
