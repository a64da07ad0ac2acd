"""`torchop.accelerate`: make calls to operators of other packages bypass the dispatcher."""
