"""Make calls to other packages' operators native: run them without PyTorch's dispatcher."""
