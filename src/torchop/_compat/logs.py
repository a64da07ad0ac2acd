"""The artifacts of TORCH_LOGS=torchop.

PyTorch parses TORCH_LOGS at the end of its import, and imports unknown names as modules. So
`torchop` needs no registration, but the artifacts below are recognized only after `torchop` in
TORCH_LOGS.
"""

import logging

from torch._logging._internal import getArtifactLogger, register_artifact


def _artifact(name: str, description: str) -> logging.Logger:
    register_artifact(name, description)
    return getArtifactLogger("torchop", name)


registration = _artifact("torchop_registration", "Operators of torchop, their kernels and rules")
calls = _artifact("torchop_calls", "Why calls of torchop's operators go through the dispatcher")
extension = _artifact("torchop_extension", "How torchop finds and compiles its native call path")
