"""Simulates the GPU of the parent process in a child process: Python imports this at startup, by PYTHONPATH."""

import os

if name := os.environ.get("MLXLM_TEST_DEVICE"):
    from tests.simulated_gpu.install import simulate

    simulate(name, os.environ["MLXLM_TEST_KERNELS"])
