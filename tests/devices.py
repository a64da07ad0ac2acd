"""The device of those tests that run on any: the CPU, or the one that tests/device has."""

import os

import torch

DEVICE = torch.device(os.environ.get("TORCHOP_TEST_DEVICE", "cpu"))
# Its dispatch key, and the one of its autograd.
BACKEND = torch._C._dispatch_key_for_device(DEVICE.type)
AUTOGRAD = f"Autograd{BACKEND}"
