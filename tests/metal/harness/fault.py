"""The one error of the harness."""


class Fault(AssertionError):
    """What a kernel does wrong, or would not be compiled or launched for on a GPU."""
