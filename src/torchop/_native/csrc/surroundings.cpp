// surroundings.cpp: reading the random number generator of the CPU, for derived formulas.
#include "surroundings.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "dispatch.h"

namespace torchop {

namespace {

// Whether a value is, or holds, no generator and no device but the CPU. Subclasses of Tensor may
// hold anything.
bool is_evidently_on_cpu(PyObject* value) {
  if (is_plain_tensor(value))
    return THPVariable_Unpack(value).is_cpu();
  return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyBool_Check(value) || PyUnicode_CheckExact(value) || PyComplex_CheckExact(value) ||
      THPDtype_Check(value);
}

// A part with its length before it, in the order of bytes of "<I".
uint8_t* write_part(uint8_t* to, const uint8_t* part, uint32_t length) {
  for (int byte = 0; byte < 4; ++byte)
    *to++ = uint8_t(length >> (8 * byte));
  std::memcpy(to, part, length);
  return to + length;
}

at::Tensor state_of_generator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::scoped_lock lock(generator.mutex());
  return at::Tensor(generator.getIntrusivePtr()->get_state());
}

} // namespace

PyObject* pack_on_cpu(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  THPObjectPtr fast(PySequence_Fast(values, "pack_on_cpu expects a sequence"));
  if (!fast)
    return nullptr;
  PyObject** items = PySequence_Fast_ITEMS(fast.get());
  PyObject** end = items + PySequence_Fast_GET_SIZE(fast.get());
  if (!std::all_of(items, end, is_evidently_on_cpu) || at::autocast::is_autocast_enabled(at::kCPU))
    Py_RETURN_NONE;
  // No operator is dispatched here: the modes and transforms around the call would intercept it.
  const at::Tensor state = state_of_generator();
  constexpr std::array<uint8_t, 2> no_autocast{};
  const auto length = uint32_t(state.numel());
  at::Tensor packed =
      at::detail::empty_cpu({int64_t(4 + length + 4 + no_autocast.size())}, at::kByte);
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  to = write_part(to, state.const_data_ptr<uint8_t>(), length);
  write_part(to, no_autocast.data(), uint32_t(no_autocast.size()));
  return THPVariable_Wrap(packed);
  END_HANDLE_TH_ERRORS
}

} // namespace torchop
