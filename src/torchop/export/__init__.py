"""Saves, loads and compiles exported programs with torchop's operators.

An exported program holds the names of its operators. If a process has not imported the modules that
define them, `torch.export.load` fails without naming a module. `save` stores these modules in the
file, and the error of `load` names the missing one. `torch.export` reads and writes the same files.
`aoti_package` and `load_package` do so for programs that AOTInductor compiles. A package may carry
its operators, for processes without Python.
"""

from torchop.export.packages import aoti_package, load_package
from torchop.export.programs import load, save

__all__ = [
    "aoti_package",
    "load",
    "load_package",
    "save",
]
