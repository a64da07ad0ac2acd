// disabled.h: the blocks of torchop.native.disabled(), in which calls go to the dispatcher.
#pragma once

#include "thread.h"

namespace torchop {

// The blocks of all threads, because calls look closer only while there are some.
inline std::atomic<int> disabled_blocks{0};

// Those of this thread, and of the one for which PyTorch runs it.
inline long open_here() {
  PyObject* count = carried("torchop_blocks");
  return count == nullptr ? 0 : PyLong_AsLong(count);
}

inline bool is_disabled() {
  return C10_UNLIKELY(disabled_blocks.load(std::memory_order_relaxed) != 0) && open_here() > 0;
}

// Opens or closes a block. PyTorch takes what was opened in a backward back when that ends.
inline void change_blocks(int by) {
  // A thread must not end with a number of its own: PyTorch would take Python's lock to free it,
  // which ends the process where Python is ending.
  static const auto& none = *new Carried(to_carry(PyLong_FromLong(0)));
  disabled_blocks += by;
  const long open = std::max(open_here() + by, 0L);
  carry("torchop_blocks", open == 0 ? none : to_carry(PyLong_FromLong(open)));
}

} // namespace torchop
