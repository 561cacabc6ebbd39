"""Replaces the functions of `mlx.core` that tell devices apart, as soon as it is imported."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

from tests.simulated_gpu.devices import DEVICES, Device
from tests.simulated_gpu.faults import Faults

VARIABLE, KERNELS_VARIABLE = "MLXLM_TEST_DEVICE", "MLXLM_TEST_KERNELS"
STARTUP = Path(__file__).parent / "startup"  # its sitecustomize.py installs the device in child processes


class SimulatedGPU:
    """The device that this process simulates.

    Args:
        device: What to simulate.
        kernels: "mlx" or "harness": how launches run.
    """

    def __init__(self, device: Device, kernels: str):
        self.device = device
        self.kernels = kernels
        self.faults = Faults()
        self.wired_limit = 0
        self.launches: list[str] = []  # names of the kernels, in the order of their launches
        self.recording = False  # whether graphs are only built, to count launches (tests/launches.py)


current: SimulatedGPU | None = None


def simulate_by_arguments() -> None:
    """Simulate the device of `--device`, if there is one. Workers of pytest-xdist are child processes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--simulated-kernels", default="mlx")
    options, _ = parser.parse_known_args()
    if options.device in DEVICES and current is None:
        simulate(options.device, options.simulated_kernels)


def simulate(name: str, kernels: str) -> None:
    """Simulate a device in this process and in its child processes. MLX must not have been imported yet."""
    global current
    assert "mlx.core" not in sys.modules, "MLX was imported before the simulated GPU was installed"
    current = SimulatedGPU(DEVICES[name], kernels)
    sys.meta_path.insert(0, _PatchOnImport())
    os.environ.update({VARIABLE: name, KERNELS_VARIABLE: kernels})
    root = str(STARTUP.parents[2])
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in (str(STARTUP), root)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), root, *paths])


class _PatchOnImport(MetaPathFinder):
    """Imports `mlx.core` as usual, then patches it."""

    def find_spec(self, name, path=None, target=None):
        if name != "mlx.core":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                from tests.simulated_gpu.patch import patch

                patch(module, current)

            spec.loader.exec_module = exec_module
        return spec
