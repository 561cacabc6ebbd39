from tests.metal.conftest import needs_harness

__all__ = ["needs_harness"]
