"""The logging artifacts that TORCH_LOGS=torchop enables.

`_parse_log_settings` (torch/_logging/_internal.py) parses TORCH_LOGS at the end of PyTorch's
import, and imports unknown names as modules. So the artifacts below are only recognized after
`torchop` in TORCH_LOGS, which imports this file.
"""

import logging

from torch._logging._internal import getArtifactLogger, register_artifact


def _artifact(name: str, description: str) -> logging.Logger:
    register_artifact(name, description)
    return getArtifactLogger("torchop", name)


registration = _artifact("torchop_registration", "Operators of torchop, their kernels and rules")
calls = _artifact("torchop_calls", "Why calls to torchop's operators go through the dispatcher")
extension = _artifact("torchop_extension", "How torchop finds and compiles its native call path")
