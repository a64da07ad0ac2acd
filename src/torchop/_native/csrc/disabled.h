// disabled.h: the state of torchop.native.disabled(), inside which calls use the dispatcher.
#pragma once

#include "thread.h"

namespace torchop {

// The number of open blocks in all threads. While it is 0, calls skip the thread-local look-up.
inline std::atomic<int> disabled_blocks{0};

// Open blocks of this thread, or of the thread on whose behalf PyTorch runs it (as in backward).
inline long open_here() {
  PyObject* count = get_obj_in_tls("torchop_blocks");
  return count == nullptr ? 0 : PyLong_AsLong(count);
}

inline bool is_disabled() {
  return C10_UNLIKELY(disabled_blocks.load(std::memory_order_relaxed) != 0) && open_here() > 0;
}

// Opens or closes blocks. PyTorch restores the count when a backward ends.
inline void change_blocks(int by) {
  // A thread must not end with its own object here: PyTorch would take the GIL to free it, which
  // aborts during interpreter finalization. So 0 is one shared object that is never freed.
  static const auto& none = *new SafeObject(make_safe_object(PyLong_FromLong(0)));
  disabled_blocks += by;
  const long open = std::max(open_here() + by, 0L);
  stash_obj_in_tls("torchop_blocks", open == 0 ? none : make_safe_object(PyLong_FromLong(open)));
}

} // namespace torchop
