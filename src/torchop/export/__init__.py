"""Save, load and compile exported programs with custom operators.

An exported program refers to operators by name. If a process has not imported the modules that
define these operators, `torch.export.load` fails, but does not say which module is missing. So
`save` stores the names of the modules in the file, and if an operator is missing, the error of
`load` names the module to import. The files are compatible with `torch.export`. `aoti_package` and
`load_package` do the same for AOTInductor packages. A package can even contain the operators and
their C++ kernels, so that it runs in processes without Python.
"""

from torchop.export.packages import aoti_package, load_package
from torchop.export.programs import load, save

__all__ = [
    "aoti_package",
    "load",
    "load_package",
    "save",
]
