// kernels.cpp: kernels of the operators that every device must implement, which create, view and
// copy tensors.
#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "streams.h"

namespace standin {

namespace {

constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

// --- Making tensors

at::Tensor empty_memory_format(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &device_allocator, keys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, keys, c10::dtype_or_default(dtype));
}

// Create a tensor of zeros without memory. Autograd uses such tensors as zero gradients.
at::Tensor zeros_without_memory(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  at::native::ZeroTensorAllocator allocator(Device(kStandin, current_device));
  return at::detail::empty_generic(
      size,
      &allocator,
      keys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
      c10::dtype_or_default(dtype),
      std::nullopt);
}

// --- Copies

// If the host waits for this copy, add the wait to the trace. With `non_blocking`, the host waits
// only for copies to memory that is not pinned. As on CUDA, raise if the copy is not allowed during
// a capture.
void note_copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (StandsIn::is_on() || from.is_cpu() == to.is_cpu())
    return;
  const at::Tensor& host = from.is_cpu() ? from : to;
  const bool is_pinned = PinnedAllocator::owns(host.storage().data());
  if (to.is_cpu() && !(non_blocking && is_pinned))
    note_host_wait("copy to the host");
  else if (from.is_cpu() && !non_blocking)
    note_host_wait("copy from the host");
  else if (!is_pinned)
    refuse_in_capture("copy from memory that is not pinned");
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  // If the size stays the same, keep the strides, as PyTorch's resize_ does.
  if (to.sizes() != from.sizes())
    to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  if (!StandsIn::is_on())
    note_host_wait("read a value");
  return OnHost(tensor).tensor().item();
}

// --- Changing a tensor's metadata

const at::Tensor& resize_(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    std::optional<at::MemoryFormat> memory_format) {
  at::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (memory_format.has_value())
    impl.empty_tensor_restride(*memory_format);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      impl.sizes(), impl.itemsize(), impl.storage_offset());
  if (bytes > impl.storage().nbytes()) {
    if (impl.storage().nbytes() != 0)
      refuse_in_capture("enlarge a tensor that holds something");
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl.storage(), bytes);
  }
  return self;
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_source_storage_offset(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

void record_stream(at::Tensor&, at::Stream user) {
  trace().note("keep memory for " + name_of(user));
}

} // namespace

c10::Storage host_storage(const c10::Storage& storage) {
  return c10::Storage(
      c10::Storage::use_byte_size_t{},
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU),
      /*resizable=*/true);
}

at::Tensor host_view(const at::Tensor& tensor, c10::Storage storage) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  note_copy(from, to, non_blocking);
  const at::AutoDispatchBelowAutograd below;
  const OnHost source(from), target(to);
  target.tensor().copy_(source.tensor());
  if (!StandsIn::is_on() && is_capturing) {
    const at::Tensor& there = to.is_cpu() ? from : to;
    const Place source_place(from.storage()), target_place(to.storage());
    capture().note(
        current_place_of(there.device().index()),
        [=, source = source.tensor(), target = target.tensor()] {
          const at::AutoDispatchBelowAutograd below;
          const Opened opened[] = {source_place.open(), target_place.open()};
          target.copy_(source);
        });
  }
  return to;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", zeros_without_memory);

  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);

  // These kernels of the CPU also work for the device, because they do not access the data.
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);

  library.impl("resize_", resize_);
  library.impl("set_.source_Tensor", set_source_tensor);
  library.impl("set_.source_Storage", set_source_storage);
  library.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  library.impl("record_stream", record_stream);
}

// The copy resolves conjugate and negative views itself, so skip PyTorch's fallbacks, which would
// first copy the view. That copy would call the fallbacks again, in an endless recursion.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace standin
