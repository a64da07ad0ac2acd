"""The core of torchop: operators, from their definition to their deregistration.

An operator has a schema and rules, such as the kernels and the backward formula. Calls read the
call plan, an object that is compiled from all rules.
"""
