"""Fixtures of the command-line tests."""

from tests.generation.conftest import lm  # noqa: F401
