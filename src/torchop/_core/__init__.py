"""The core of torchop: operators, from their definition to their deregistration."""
