#include "gradients.h"

#if TORCHOP_KNOWS_NODES

#include <torch/csrc/autograd/python_function.h>

namespace torchop {

namespace {

// Returns an owning pointer to the node in `THPFunction::cdata`, which is a std::weak_ptr in
// PyTorch 2.11 and 2.12, and itself an owning pointer in later releases.
template <typename N>
std::shared_ptr<N> node_of(const std::weak_ptr<N>& node) {
  return node.lock();
}
template <typename Pointer>
const Pointer& node_of(const Pointer& node) {
  return node;
}

bool fits(const at::Tensor& gradient, const torch::autograd::InputMetadata& input) {
  if (input.is_tensor_subclass() || input.is_nested_tensor() || gradient.is_nested())
    return true; // leave the check to autograd
  // The dtypes may differ, since autograd casts the gradient (validate_outputs in engine.cpp).
  return gradient.sym_sizes().equals(input.shape_as_dim_vector()) &&
      gradient.device() == input.device() &&
      gradient.is_complex() == c10::isComplexType(c10::typeMetaToScalarType(input.dtype()));
}

} // namespace

bool fit_inputs(PyObject* gradients, PyObject* ctx) {
  if (!PyType_IsSubtype(Py_TYPE(ctx), &THPFunctionType))
    return true;
  const auto& function = *reinterpret_cast<THPFunction*>(ctx);
  const auto& node = node_of(function.cdata);
  if (node == nullptr)
    return true;
  const size_t count = PyTuple_GET_SIZE(gradients);
  const size_t edges = node->num_outputs();
  size_t number = 0; // the index of the next edge; only tensor arguments have edges
  for (size_t index = 0; index < count && index < function.is_variable_input.size(); ++index) {
    if (!function.is_variable_input[index])
      continue;
    if (number == edges)
      break;
    const torch::autograd::Edge& edge = node->next_edge(number++);
    PyObject* gradient = PyTuple_GET_ITEM(gradients, index);
    if (gradient == Py_None || !edge.is_valid())
      continue;
    if (!fits(THPVariable_Unpack(gradient), edge.function->input_metadata(edge.input_nr)))
      return false;
  }
  return true;
}

} // namespace torchop

#else // TORCHOP_KNOWS_NODES

namespace torchop {

bool fit_inputs(PyObject*, PyObject*) {
  return true;
}

} // namespace torchop

#endif
