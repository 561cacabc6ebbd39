"""A simulated GPU: runs the tests of code that only runs off the CPU, on a machine without a GPU.

    pytest --device simulated-m2 tests/kernels

MLX's default device is reported as a GPU, with the name, memory and limits of the chosen device; the arrays stay on
the CPU. So mlxlm behaves as on that device: it trains in bfloat16, keeps quantized weights, raises the wired limit,
and chooses, checks and launches Metal kernels. A launch runs in one of two ways (`--simulated-kernels`):

- "mlx" (the default): lazy MLX operations with the contract of the kernel (`kernel_references.py`). It is fast, and
  works inside `mx.compile`, `mx.checkpoint` and gradients.
- "harness": the source of the kernel, in the harness of `tests/metal`. A launch inside a trace, where arrays have no
  values yet, still runs as "mlx".

`tests/launches.py` counts the kernels that MLX itself would launch for a graph.

Tests script faults with the fixture `simulated_gpu`: kernels that fail to compile, need too many registers or compute
wrong results, a refused wired limit, a failed command buffer. Child processes simulate the same device.

Not simulated: the order in which a GPU computes, its rounding (such as TF32 on M5), its speed, and errors of Metal
that nobody scripted.
"""

from tests.simulated_gpu.devices import DEVICES, Device

__all__ = ["DEVICES", "Device"]
