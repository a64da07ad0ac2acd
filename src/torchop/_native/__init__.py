"""The native call path: where its extension comes from, and how calls get to it."""
