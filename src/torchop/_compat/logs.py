"""torchop's loggers for TORCH_LOGS, which PyTorch calls artifacts.

PyTorch parses TORCH_LOGS at the end of `import torch` (`_parse_log_settings` in
torch/_logging/_internal.py), and imports an unknown name as a module. So a setting such as
`TORCH_LOGS=torchop,torchop_calls` must name `torchop` first: this imports torchop, which registers
the artifact `torchop_calls`.
"""

import logging

from torch._logging._internal import getArtifactLogger, register_artifact


def _artifact(name: str, description: str) -> logging.Logger:
    register_artifact(name, description)
    return getArtifactLogger("torchop", name)


registration = _artifact("torchop_registration", "Operators of torchop, their kernels and rules")
calls = _artifact("torchop_calls", "Why calls to torchop's operators go through the dispatcher")
extension = _artifact("torchop_extension", "How torchop finds and compiles its native call path")
