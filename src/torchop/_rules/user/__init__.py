"""The rules that torchop itself creates with `torchop.Rule`, such as inverses and FLOP formulas."""
