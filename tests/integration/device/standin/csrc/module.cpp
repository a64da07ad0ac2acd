// module.cpp: the Python bindings.
#include <torch/csrc/utils/pybind.h>

#include "fallback.h"
#include "generator.h"
#include "graph.h"
#include "streams.h"
#include "trace.h"

PYBIND11_MODULE(_standin, module) {
  using namespace standin;
  module.def("trace", [](bool on) { return trace().turn(on); });
  module.def("note", [](std::string line) { trace().note(std::move(line)); });
  module.def("limit_memory", [](std::optional<size_t> room) { memory().limit(room); });
  module.def("set_fallback", set_fallback);
  module.def("add_kernels", add_kernels);
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("device_count", [] { return int(device_count); });
  module.def("is_capturing", [] { return capture().includes(current_stream()); });
  module.def("current_place", current_place);
  pybind11::class_<Graph>(module, "Graph")
      .def(pybind11::init<>())
      .def("begin", &Graph::begin, pybind11::arg("pool") = 0)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool);
}
