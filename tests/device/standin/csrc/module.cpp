// module.cpp: what Python sees.
#include <torch/csrc/utils/pybind.h>

#include "fallback.h"
#include "generator.h"
#include "streams.h"
#include "trace.h"

PYBIND11_MODULE(_standin, module) {
  using namespace standin;
  module.def("trace", [](bool on) { return trace().turn(on); });
  module.def("note", [](std::string line) { trace().note(std::move(line)); });
  module.def("capture", [](bool on) { is_capturing = on; });
  module.def("set_fallback", set_fallback);
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("device_count", [] { return int(device_count); });
  module.def("memory_allocated", [] { return memory().bytes(); });
  module.def("current_place", current_place);
}
