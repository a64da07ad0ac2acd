"""Dynamo and AOTInductor where somebody asks for them: eager use imports neither."""

from __future__ import annotations

from typing import Any

import torch

from torchop._compat.compilers import DYNAMO


def import_dynamo() -> str:
    """Imports Dynamo, which registers operators of its own; returns the name of the module."""
    import torch._dynamo  # noqa: F401  # for what it registers

    return DYNAMO


def compile_aoti_package(program: Any, path: str | None, configs: dict[str, Any]) -> str:
    """Compiles an exported program with AOTInductor into a package; returns its path."""
    package: str = torch._inductor.aoti_compile_and_package(
        program, package_path=path, inductor_configs=configs
    )
    return package


def load_aoti_package(path: str, **options: Any) -> Any:
    return torch._inductor.aoti_load_package(path, **options)
