"""The device of those tests that run on any: the CPU, or the one that tests/device has."""

import os

import torch
from torch.library import CustomOpDef

DEVICE = torch.device(os.environ.get("TORCHOP_TEST_DEVICE", "cpu"))
TYPE = DEVICE.type
# Its dispatch key, and the one of its autograd.
BACKEND = torch._C._dispatch_key_for_device(DEVICE.type)
AUTOGRAD = f"Autograd{BACKEND}"
# Whether torch.library registers autocast for every device; in 2.11, for the CPU and CUDA alone.
STOCK_AUTOCASTS_ALL = "_autocast_dtype" in CustomOpDef.__init__.__code__.co_names
