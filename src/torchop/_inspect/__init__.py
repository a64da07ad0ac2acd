"""Asking what an operator does, how calls go, and what a program calls."""
