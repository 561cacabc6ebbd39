"""The exception of the harness."""


class Fault(AssertionError):
    """An error in a kernel, or code or a launch that Metal rejects."""
