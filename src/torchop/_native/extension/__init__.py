"""Getting the native call path compiled."""
