// members.h: access private members of PyTorch's classes that have no inline accessor.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/TensorImpl.h>

namespace torchop {

// The base class of the tag structs below. `Object` is the class with the private member.
template <class Object>
struct MemberOf {
  using Class = Object;
};

// Makes a private member accessible through a loophole in C++: access checks do not apply to the
// arguments of an explicit template instantiation ([temp.spec]). To expose another member, add a
// tag struct, a declaration of `member_of` and an instantiation of `Expose`. If PyTorch renames a
// member, this file fails to compile.
template <auto Member, class Tag>
struct Expose {
  friend auto& member_of(Tag, const typename Tag::Class& object) {
    return object.*Member;
  }
};

struct OperatorDefinition : MemberOf<c10::OperatorHandle> {};
auto& member_of(OperatorDefinition, const c10::OperatorHandle& object);
template struct Expose<&c10::OperatorHandle::operatorDef_, OperatorDefinition>;

struct Boxed : MemberOf<c10::KernelFunction> {};
auto& member_of(Boxed, const c10::KernelFunction& object);
template struct Expose<&c10::KernelFunction::boxed_kernel_func_, Boxed>;

struct Functor : MemberOf<c10::BoxedKernel> {};
auto& member_of(Functor, const c10::BoxedKernel& object);
template struct Expose<&c10::BoxedKernel::functor_, Functor>;

struct Function : MemberOf<c10::BoxedKernel> {};
auto& member_of(Function, const c10::BoxedKernel& object);
template struct Expose<&c10::BoxedKernel::boxed_kernel_func_, Function>;

struct DispatcherGuard : MemberOf<c10::Dispatcher> {};
auto& member_of(DispatcherGuard, const c10::Dispatcher& object);
template struct Expose<&c10::Dispatcher::guard_, DispatcherGuard>;

struct LookupTable : MemberOf<c10::Dispatcher> {};
auto& member_of(LookupTable, const c10::Dispatcher& object);
template struct Expose<&c10::Dispatcher::operatorLookupTable_, LookupTable>;

struct RegisteredKernels : MemberOf<c10::impl::OperatorEntry> {};
auto& member_of(RegisteredKernels, const c10::impl::OperatorEntry& object);
template struct Expose<&c10::impl::OperatorEntry::kernels_, RegisteredKernels>;

struct NonFallthrough : MemberOf<c10::DispatchKeyExtractor> {};
auto& member_of(NonFallthrough, const c10::DispatchKeyExtractor& object);
template struct Expose<&c10::DispatchKeyExtractor::nonFallthroughKeys_, NonFallthrough>;

struct PerBackend : MemberOf<c10::DispatchKeyExtractor> {};
auto& member_of(PerBackend, const c10::DispatchKeyExtractor& object);
template struct Expose<&c10::DispatchKeyExtractor::requiresBitsetPerBackend_, PerBackend>;

// The accessor TensorImpl::autograd_meta() is not inline, and we read it for every tensor argument,
// so access the member directly.
struct AutogradMetaOf : MemberOf<c10::TensorImpl> {};
auto& member_of(AutogradMetaOf, const c10::TensorImpl& object);
template struct Expose<&c10::TensorImpl::autograd_meta_, AutogradMetaOf>;

} // namespace torchop
