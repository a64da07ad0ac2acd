"""Operators that other packages registered, called natively."""
