"""Choose the device for tests that run on any device."""

import os

import pytest
import torch
from torch.library import CustomOpDef

DEVICE = torch.device(os.environ.get("TORCHOP_TEST_DEVICE", "cpu"))
TYPE = DEVICE.type
# A second device type, used in names and dispatch keys. Tests create no tensors on it.
OTHER = "xpu" if TYPE == "cuda" else "cuda"
# The dispatch key of the device's kernels, such as "CPU" or "PrivateUse1".
BACKEND = torch._C._dispatch_key_for_device(DEVICE.type)
# The backend as error messages show it. Several devices can use PrivateUse1, so for that key the
# messages add the device type.
BACKEND_SHOWN = f"{BACKEND} ({TYPE})" if BACKEND == "PrivateUse1" else BACKEND
OTHER_BACKEND = torch._C._dispatch_key_for_device(OTHER)
AUTOGRAD = f"Autograd{BACKEND}"
# True if torch.library can register autocast for every device. PyTorch 2.11 supports only CPU and
# CUDA.
STOCK_AUTOCASTS_ALL = "_autocast_dtype" in CustomOpDef.__init__.__code__.co_names
# Autograd runs the nodes of the CPU in the thread that calls `backward`, and the nodes of other
# devices in separate threads, which have the caller's context variables only since 2.12.
needs_context_in_backward = pytest.mark.needs_torch(
    "2.0" if TYPE == "cpu" else "2.12", "backward has the context of its caller"
)
