// lifetime.h: find out whether an operator was deregistered, and keep the memory alive that running
// calls read when operators and kernels are deregistered.
//
// The dispatcher reads an operator's schema and dispatch table without a lock, and without the GIL.
// When an operator is deregistered, PyTorch frees both, even while a call in another thread reads
// them. Waiting until all calls have left the dispatcher could take forever or deadlock, so we leak
// this memory instead:
//
// - A deregistered operator keeps its OperatorEntry (schema and dispatch table) forever. We only
//   remove the name from the dispatcher's lookup table, so the next operator of this name gets a
//   new OperatorEntry. Running calls continue with the old schema and kernels.
// - A kernel that is removed from an operator keeps its functor forever.
//
// With the GIL, the functors release their Python functions, so each operator leaks only about 8
// KB.
//
// Two races in PyTorch remain. First, when a kernel is registered or removed,
// `OperatorEntry::updateDispatchTableEntry_` assigns to an element of the dispatch table that other
// threads may be reading. Second, if another library has registered kernels for a deregistered
// operator, PyTorch keeps the OperatorEntry for the next operator of this name. The schema is then
// freed, and running calls of the old operator may raise an error.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchop {

// Whether an operator is still registered. This object outlives the operator.
using Lifetime = std::atomic<bool>;
using LifetimePointer = std::shared_ptr<Lifetime>;

// Returns the Lifetime of a registered operator. It becomes false when the operator is deregistered
// by any package.
LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// keep_memory(defined, implemented, frees_functions) must be called before PyTorch deregisters
// operators and kernels. `defined` contains the names of the operators to deregister, and
// `implemented` the names of operators that only lose kernels. Returns a function that must be
// called afterwards. With the GIL, and if `frees_functions` is true, it replaces the Python
// functions in the deregistered kernels with functions that raise OperatorGoneError.
PyObject* keep_memory(PyObject*, PyObject* args);

} // namespace torchop
