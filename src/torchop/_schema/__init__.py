"""From annotations to a schema, and what a schema says about arguments and results."""
