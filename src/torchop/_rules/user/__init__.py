"""The public rules (`torchop.Rule`) that torchop ships, one module each."""
