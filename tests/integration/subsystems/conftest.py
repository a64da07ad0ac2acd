"""Reset the compilers for each test, as in `tests/integration/compile`."""

from tests.integration.compile.conftest import _fresh_compiler  # noqa: F401
