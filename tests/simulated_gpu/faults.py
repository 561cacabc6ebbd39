"""Errors of a GPU that tests can script."""

from __future__ import annotations

from dataclasses import dataclass, field

# What MLX raises (mlx/backend/metal: device.cpp, custom_kernel.cpp, eval.cpp, allocator.cpp).
NOT_COMPILED = (
    "[metal::Device] Unable to build metal library from source\nprogram_source:12:3: error: use of undeclared "
    "identifier 'simd_summ'"
)
TOO_MANY_THREADS = "Thread group size (512) is greater than  the maximum allowed threads per threadgroup (448)."
INSUFFICIENT_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)
IMPACTING_INTERACTIVITY = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
WIRED_LIMIT_REFUSED = (
    "[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size is not allowed."
)


@dataclass
class Faults:
    """The faults in effect. `clear` ends all of them.

    Args:
        not_compiled: Names of kernels that the compiler rejects. A launch raises RuntimeError when it is evaluated.
        too_many_registers: Names of kernels whose threadgroup is larger than their registers allow. A launch raises
            ValueError (C++'s invalid_argument) when it is evaluated.
        wrong: Names of kernels that compute wrong results.
        wired_limit_refused: Whether `mx.set_wired_limit` raises ValueError.
        failing_evaluations: Numbers of the coming evaluations that fail as a command buffer does, 0 for the next one.
        command_buffer_error: What they raise.
    """

    not_compiled: set[str] = field(default_factory=set)
    too_many_registers: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    wired_limit_refused: bool = False
    failing_evaluations: set[int] = field(default_factory=set)
    command_buffer_error: str = INSUFFICIENT_MEMORY
    pending: Exception | None = None  # the next evaluation raises it
    evaluations: int = 0  # since the last `clear`

    def clear(self) -> None:
        """End all faults."""
        self.__init__()

    def launch(self, kernel: str) -> None:
        """Note the launch of a kernel: if it is faulty, the next evaluation raises."""
        if kernel in self.not_compiled:
            self.pending = RuntimeError(NOT_COMPILED)
        elif kernel in self.too_many_registers:
            self.pending = ValueError(TOO_MANY_THREADS)

    def evaluate(self) -> None:
        """Raise what the evaluation that begins now raises."""
        self.evaluations += 1
        fails = 0 in self.failing_evaluations
        self.failing_evaluations = {n - 1 for n in self.failing_evaluations if n > 0}
        if error := self.pending:
            self.pending = None
            raise error
        if fails:
            raise RuntimeError(self.command_buffer_error)
