"""The rules of the public kind, `torchop.Rule`, that torchop ships: a file for each."""
