"""The functions of `mlx.core` on a simulated GPU."""

from __future__ import annotations

from functools import wraps
from types import ModuleType

from tests.simulated_gpu.faults import WIRED_LIMIT_REFUSED
from tests.simulated_gpu.gpu_primitives import replace_functions
from tests.simulated_gpu.install import SimulatedGPU
from tests.simulated_gpu.kernel import SimulatedKernel


def patch(mx: ModuleType, gpu: SimulatedGPU) -> None:
    """Make `mlx.core` report the device, and compute on the CPU what is meant for the GPU."""
    device, on_metal = gpu.device, gpu.device.backend == "metal"
    cpu_info = mx.device_info

    def is_device(target, kind):
        return isinstance(target, mx.Device | mx.DeviceType) and target == kind

    def on_cpu(function):
        """Pass the CPU instead of the GPU as the first argument."""

        @wraps(function)
        def call(target=None):
            if target is None:
                return function()
            return function(mx.cpu if is_device(target, mx.gpu) else target)

        return call

    for name in (
        "default_stream",
        "new_stream",
        "new_thread_local_stream",
        "new_thread_unsafe_stream",
        "stream",
        "synchronize",
    ):
        setattr(mx, name, on_cpu(getattr(mx, name)))

    def device_info(target=None):
        return cpu_info(mx.cpu) if is_device(target, mx.cpu) else dict(device.info)

    def set_wired_limit(limit):
        if gpu.faults.wired_limit_refused or limit > device.working_set:
            raise ValueError(WIRED_LIMIT_REFUSED)
        previous, gpu.wired_limit = gpu.wired_limit, limit
        return previous

    def evaluating(function):
        @wraps(function)
        def call(*args):
            gpu.faults.evaluate()
            return function(*args)

        return call

    @wraps(mx.fast.metal_kernel)
    def metal_kernel(*args, **kwargs):
        return SimulatedKernel(gpu, mx, *args, **kwargs)

    mx.default_device = lambda: mx.Device(mx.gpu)
    mx.is_available = lambda target: True
    mx.device_count = lambda kind: 1
    mx.device_info = mx.metal.device_info = device_info
    mx.metal.is_available = lambda: on_metal
    mx.cuda.is_available = lambda: not on_metal
    mx.eval, mx.async_eval = evaluating(mx.eval), evaluating(mx.async_eval)
    replace_functions(mx, gpu)
    if on_metal:
        mx.set_wired_limit = mx.metal.set_wired_limit = set_wired_limit
        mx.fast.metal_kernel = metal_kernel
