"""Choose the device for tests that run on any device."""

import os

import pytest
import torch
from torch.library import CustomOpDef

DEVICE = torch.device(os.environ.get("TORCHOP_TEST_DEVICE", "cpu"))
TYPE = DEVICE.type
# Another type, of which there is no tensor in these tests.
OTHER = "xpu" if TYPE == "cuda" else "cuda"
# Its dispatch key, and the one of its autograd.
BACKEND = torch._C._dispatch_key_for_device(DEVICE.type)
# As messages name it: the key of a plug-in does not tell the device.
BACKEND_SHOWN = f"{BACKEND} ({TYPE})" if BACKEND == "PrivateUse1" else BACKEND
OTHER_BACKEND = torch._C._dispatch_key_for_device(OTHER)
AUTOGRAD = f"Autograd{BACKEND}"
# Whether torch.library registers autocast for every device; in 2.11, for the CPU and CUDA alone.
STOCK_AUTOCASTS_ALL = "_autocast_dtype" in CustomOpDef.__init__.__code__.co_names
# The CPU has its backward in the thread that asks for it, every other device in one of its own.
needs_context_in_backward = pytest.mark.needs_torch(
    "2.0" if TYPE == "cpu" else "2.12", "backward has the context of its caller"
)
