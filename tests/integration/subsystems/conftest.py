"""Give each test a compiler without cached programs, as in `tests/integration/compile`."""

from tests.integration.compile.conftest import _fresh_compiler  # noqa: F401
