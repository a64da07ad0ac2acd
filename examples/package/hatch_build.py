"""Compile the C++ code in csrc when a wheel is built, or for `pip install -e`."""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version, build_data):
        library = Path(self.root, "src", "mykernels", "_native.so")
        sources = sorted(map(str, Path(self.root, "csrc").glob("*.cpp")))
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        flags = ["-std=c++20", "-O3", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*compiler, *sources, *flags], check=True)
        build_data["artifacts"].append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        # The library is not linked with Python, so the wheel works with every Python version.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
