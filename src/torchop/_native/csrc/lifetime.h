// lifetime.h: find out whether an operator was deregistered, and keep memory that running calls
// still read alive when operators and kernels are deregistered.
//
// The dispatcher reads an operator's schema and dispatch table without a lock or the GIL. When an
// operator is deregistered, PyTorch frees both, even if a call in another thread is reading them.
// Waiting until all calls have left the dispatcher could take forever or deadlock, so we leak this
// memory instead:
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
// operator, PyTorch reuses the OperatorEntry for the next operator of this name and frees the old
// schema, so running calls of the old operator may raise an error.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchop {

// True as long as an operator is registered. This object outlives the operator.
using Lifetime = std::atomic<bool>;
using LifetimePointer = std::shared_ptr<Lifetime>;

// Returns the Lifetime of a registered operator. It becomes false when any package deregisters the
// operator.
LifetimePointer lifetime_of(const c10::OperatorHandle& op);

// keep_memory(defined, implemented, frees_functions) must be called before PyTorch deregisters
// operators and kernels. `defined` contains the names of the operators to deregister, and
// `implemented` the names of operators that only lose kernels. Returns a function that must be
// called after the deregistration. With the GIL, and if `frees_functions` is true, this function
// replaces the Python functions in the deregistered kernels with functions that raise
// OperatorGoneError.
PyObject* keep_memory(PyObject*, PyObject* args);

} // namespace torchop
