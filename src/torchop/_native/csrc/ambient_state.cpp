#include "ambient_state.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "dispatch.h"

namespace torchop {

namespace {

using Bytes = std::vector<uint8_t>;

struct Accelerators {
  int64_t count;
  at::DeviceType type;

  bool have(const at::Device& device) const {
    return device.type() == type && device.index() < count;
  }
};

// Returns whether this file can pack the random state for a call with this argument. It supports
// neither generators nor tensors on devices other than the CPU and these accelerators. It does not
// support tensor subclasses either, because they may contain anything.
bool is_plain(PyObject* value, const Accelerators& accelerators) {
  if (is_plain_tensor(value)) {
    const at::Tensor& tensor = THPVariable_Unpack(value);
    return tensor.is_cpu() || accelerators.have(tensor.device());
  }
  return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyBool_Check(value) || PyUnicode_CheckExact(value) || PyComplex_CheckExact(value) ||
      THPDtype_Check(value);
}

// Returns whether all ambient settings have their defaults: autocast is disabled, and the default
// dtype and device are unchanged.
bool settings_are_plain() {
  return !autocast_is_enabled() && c10::get_default_dtype_as_scalartype() == at::kFloat &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0;
}

// Starts a section of the packed tensor by appending the section's length as a little-endian uint32
// ("<I" in Python's struct), and the first byte.
void begin(Bytes& to, size_t size, uint8_t first) {
  for (int byte = 0; byte < 4; ++byte)
    to.push_back(uint8_t(size >> (8 * byte)));
  to.push_back(first);
}

// Appends the ambient settings in the format of `_SETTINGS` in replay.py. Only default settings are
// supported, and all their bytes are zero.
void append_settings(Bytes& to, const Accelerators& accelerators) {
  const size_t size = 1 + 1 + 24 + (accelerators.count > 0 ? 4 : 2);
  begin(to, size, uint8_t(accelerators.count));
  to.resize(to.size() + size - 1);
}

// Avoids `const_data_ptr<uint8_t>`, because GCC and Clang mangle its name differently, so the
// symbol might be missing in a PyTorch that was built with the other compiler.
const uint8_t* bytes_of(const at::Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

// Appends the state of a generator. The first byte of the section is 1, to say that a state
// follows.
void append_state(Bytes& to, const at::Tensor& state) {
  const size_t size = state.numel();
  begin(to, 1 + size, 1);
  to.insert(to.end(), bytes_of(state), bytes_of(state) + size);
}

// Throws if a device graph is being captured.
Bytes packed_states(const Accelerators& accelerators) {
  Bytes states;
  for (int64_t index = 0; index < accelerators.count; ++index) {
    at::Generator generator =
        at::globalContext().defaultGenerator(at::Device(accelerators.type, at::DeviceIndex(index)));
    std::scoped_lock lock(generator.mutex());
    append_state(states, generator.get_state());
  }
  return states;
}

// The state of the CPU generator. Comparing these members to find out whether the state has changed
// is ten times as fast as calling get_state().
struct Generated {
  at::mt19937_data_pod engine;
  std::optional<float> next_float;
  std::optional<double> next_double;

  explicit Generated(at::CPUGeneratorImpl& generator)
      : engine(generator.engine().data()),
        next_float(generator.next_float_normal_sample()),
        next_double(generator.next_double_normal_sample()) {}

  bool operator==(const Generated& other) const {
    return engine.left_ == other.engine.left_ && engine.next_ == other.engine.next_ &&
        engine.seed_ == other.engine.seed_ && engine.seeded_ == other.engine.seeded_ &&
        engine.state_ == other.engine.state_ && next_float == other.next_float &&
        next_double == other.next_double;
  }
};

struct State {
  Generated cpu_state;
  Bytes accelerator_states;
};

// The tensor that `pack_plain` returned last, and the generator states in it. Guarded by the CPU
// generator's mutex. Never freed, because a static destructor runs after the interpreter was
// finalized, so it could not release `packed`.
struct Latest {
  PyObject* packed;
  State state;
  // A copy of the data in `packed`, to detect writes. A compiled graph may overwrite `packed`,
  // because it may reuse the memory of a saved tensor.
  Bytes bytes;

  bool is_unmodified() const {
    const at::Tensor& tensor = THPVariable_Unpack(packed);
    return tensor.nbytes() == bytes.size() &&
        std::memcmp(tensor.const_data_ptr(), bytes.data(), bytes.size()) == 0;
  }
};
Latest* latest_state = nullptr;

// If the generators still have the states in `packed`, returns a new reference to `packed`.
// Otherwise returns nullptr, and sets `now` and `cpu_state` to the current states.
PyObject* unchanged(
    PyObject* packed,
    Bytes&& accelerator_states,
    std::optional<State>& now,
    at::Tensor& cpu_state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  auto& implementation = *generator.get<at::CPUGeneratorImpl>();
  std::scoped_lock lock(generator.mutex());
  now.emplace(State{Generated(implementation), std::move(accelerator_states)});
  if (latest_state != nullptr && latest_state->packed == packed &&
      latest_state->state.cpu_state == now->cpu_state &&
      latest_state->state.accelerator_states == now->accelerator_states &&
      latest_state->is_unmodified())
    return Py_NewRef(packed);
  cpu_state = at::Tensor(implementation.get_state());
  return nullptr;
}

PyObject* remember(PyObject* packed, State&& state, Bytes&& bytes) {
  // Freeing the old tensor may run arbitrary code, so destroy it only after releasing the lock.
  THPObjectPtr before;
  auto latest =
      std::make_unique<Latest>(Latest{Py_NewRef(packed), std::move(state), std::move(bytes)});
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::scoped_lock lock(generator.mutex());
  latest.reset(std::exchange(latest_state, latest.release()));
  if (latest != nullptr)
    before = THPObjectPtr(latest->packed);
  return packed;
}

} // namespace

// Reads the excluded keys like at::autocast::is_autocast_enabled. We do not call that function,
// because including its header, ATen/autocast_mode.h, would double the time to parse the extension.
bool autocast_is_enabled() {
  return !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
}

PyObject* pack_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && (args[1] == Py_None || is_plain_tensor(args[1])) && PyLong_Check(args[2]),
      "pack_plain expects a sequence, a tensor or None, and a number of accelerators");
  THPObjectPtr fast(PySequence_Fast(args[0], "pack_plain expects a sequence"));
  if (!fast)
    return nullptr;
  Accelerators accelerators{PyLong_AsLongLong(args[2]), at::kCPU};
  if (accelerators.count > 0)
    accelerators.type = at::getAccelerator(true).value();
  PyObject** items = PySequence_Fast_ITEMS(fast.get());
  PyObject** end = items + PySequence_Fast_GET_SIZE(fast.get());
  const auto plain = [&](PyObject* item) { return is_plain(item, accelerators); };
  if (!std::all_of(items, end, plain) || !settings_are_plain())
    Py_RETURN_NONE;
  // Do not call PyTorch operators from here on, because active modes and transforms would intercept
  // them.
  Bytes accelerator_states;
  try {
    accelerator_states = packed_states(accelerators);
  } catch (const c10::Error&) { // a device graph is being captured
    Py_RETURN_NONE;
  }
  std::optional<State> now;
  at::Tensor cpu_state;
  if (PyObject* same = unchanged(args[1], std::move(accelerator_states), now, cpu_state);
      C10_LIKELY(same != nullptr))
    return same;
  // The same format as in `_pack` in replay.py: first the generator states, then the settings.
  Bytes bytes;
  append_state(bytes, cpu_state);
  bytes.insert(bytes.end(), now->accelerator_states.begin(), now->accelerator_states.end());
  append_settings(bytes, accelerators);
  if (args[1] != Py_None) {
    const at::Tensor& latest = THPVariable_Unpack(args[1]);
    if (latest.nbytes() == bytes.size() &&
        std::memcmp(latest.const_data_ptr(), bytes.data(), bytes.size()) == 0)
      return remember(Py_NewRef(args[1]), std::move(*now), std::move(bytes));
  }
  at::Tensor packed = at::detail::empty_cpu({int64_t(bytes.size())}, at::kByte);
  std::memcpy(packed.mutable_data_ptr<uint8_t>(), bytes.data(), bytes.size());
  PyObject* made = THPVariable_Wrap(packed);
  return made == nullptr ? nullptr : remember(made, std::move(*now), std::move(bytes));
  END_HANDLE_TH_ERRORS
}

} // namespace torchop
