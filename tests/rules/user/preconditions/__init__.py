"""Tests of the words of preconditions, and of all that is declared of an operator."""
