"""An operator's kernels for each device type, and the dispatcher kernels that run them."""
