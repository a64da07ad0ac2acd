#include "free_threads.h"

#ifdef Py_GIL_DISABLED

namespace torchop {

void make_immortal(Thread& here, PyObject* callee) {
  here.calls_until_check = Thread::interval;
  if (callee->ob_ref_local == UINT32_MAX || callee->ob_tid == _Py_ThreadId())
    return;
  // No other thread may modify the object's reference count while we set these fields, so abuse
  // PyUnstable_GC_VisitObjects to stop all other threads. The callback returns 0 to end the visit
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

} // namespace torchop

#endif
