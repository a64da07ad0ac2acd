"""Save, load and compile exported programs with custom operators.

An exported program refers to operators by name. If a process has not imported the modules that
define them, `torch.export.load` fails without naming a module. `save` stores the modules in the
file, and `load` names a missing one in the error. `torch.export` reads and writes the same files.
`aoti_package` and `load_package` do the same for AOTInductor packages. A package may also carry
the operators, for processes without Python.
"""

from torchop.export.packages import aoti_package, load_package
from torchop.export.programs import load, save

__all__ = [
    "aoti_package",
    "load",
    "load_package",
    "save",
]
