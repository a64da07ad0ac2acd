"""Give each test here a compiler without cached programs, as `tests/integration/compile` does."""

from tests.integration.compile.conftest import _fresh_compiler  # noqa: F401
