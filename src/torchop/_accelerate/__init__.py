"""`torchop.accelerate`: make calls to operators of other packages native.

A native call bypasses PyTorch's dispatcher.
"""
