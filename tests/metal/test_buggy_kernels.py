"""The harness reports each bug of buggy_kernels.py."""

from __future__ import annotations

import ctypes
import signal
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from tests.metal import harness
from tests.metal.buggy_kernels import BUGGY_KERNELS, GID, REVERSED, BuggyKernel
from tests.metal.harness.build import symbolizer

pytestmark = pytest.mark.usefixtures("needs_harness")


def launch(kernel: BuggyKernel, x: mx.array | None = None, **options) -> mx.array:
    function = harness.metal_kernel(
        "buggy", ["x"], list(kernel.results), dedent(kernel.source), header=kernel.header, **options
    )
    results = function(
        inputs=[mx.arange(kernel.inputs).astype(kernel.dtype) if x is None else x],
        output_shapes=[shape for shape, _ in kernel.outputs],
        output_dtypes=[dtype for _, dtype in kernel.outputs],
        grid=(kernel.grid, 1, 1),
        threadgroup=(kernel.threadgroup, 1, 1),
        template=list(kernel.template.items()),
    )
    return results[0]


def run(kernel: BuggyKernel, seed: int = 0) -> mx.array:
    with harness.use(seed):
        return launch(kernel)


@pytest.mark.parametrize("name", BUGGY_KERNELS)
def test_bug_is_found(name):
    kernel = BUGGY_KERNELS[name]
    with pytest.raises(harness.Fault, match=kernel.message) as caught:
        run(kernel)
    assert "buggy" in str(caught.value) or "header" in str(caught.value)


@pytest.mark.parametrize(
    "name", [n for n, p in BUGGY_KERNELS.items() if "race" in p.message or "divergence" in p.message]
)
def test_bug_is_found_in_any_order_of_threads(name):
    for seed in (1, 2):
        with pytest.raises(harness.Fault, match=BUGGY_KERNELS[name].message):
            run(BUGGY_KERNELS[name], seed)


def test_more_arguments_than_metal_allows():
    names = tuple(f"y{i}" for i in range(31))
    source = "".join(f"{name}[0] = x[0];" for name in names)
    with pytest.raises(harness.Fault, match="32 buffers .* 31"):
        run(BuggyKernel(source, "", outputs=[((1,), mx.float32)] * 31, results=names))


def test_a_fault_names_line_and_thread():
    source = """
        uint g = thread_position_in_grid.x;
        y[g] =
            x[g * 2];
    """
    line = "buggy.metal:4" if symbolizer() else ""
    with pytest.raises(harness.Fault, match=rf"buggy: .* x\[64\].*; thread \(32, 0, 0\) .*{line}"):
        run(BuggyKernel(source, "", grid=33, threadgroup=33))


def test_an_endless_loop_ends_and_leaves_the_process_as_it_was(monkeypatch):
    """Signal handlers, their stack and the timer are restored: faulthandler needs them."""
    libc = ctypes.CDLL(None)

    def state():
        actions = [ctypes.create_string_buffer(256) for _ in range(4)]
        for number, action in zip((signal.SIGSEGV, signal.SIGILL, signal.SIGVTALRM), actions[1:], strict=True):
            libc.sigaction(int(number), None, action)
        libc.sigaltstack(None, actions[0])
        return actions[0].raw[:24], [a.raw[:8] for a in actions[1:]], signal.getitimer(signal.ITIMER_VIRTUAL)

    monkeypatch.setattr("tests.metal.harness.run.SECONDS", 0.1)
    before = state()
    with pytest.raises(harness.Fault, match="timeout after 0.1 seconds"):
        run(BuggyKernel(GID + "float v = x[g]; while (v >= 0) v = v + 1 - v / 2; y[g] = v;", ""))
    assert state() == before


def test_launches_of_two_python_threads():
    kernel = BuggyKernel(REVERSED.format("threadgroup_barrier(mem_flags::mem_threadgroup);"), "")
    with harness.use(), ThreadPoolExecutor(4) as pool:
        for y in pool.map(lambda _: np.array(launch(kernel)), range(40)):
            np.testing.assert_array_equal(y, np.arange(64)[::-1])


def test_uninitialised_variables_are_nan():
    y = run(BuggyKernel(GID + "float v[2]; if (x[g] > 5) v[1] = 3.0f; y[g] = v[1];", ""))
    y = np.array(y)
    assert np.isnan(y[:6]).all() and (y[6:] == 3).all()


def test_a_kernel_that_forgets_strides_is_wrong_for_some_layout():
    source = GID + "y[g] = x[g / 8 * x_strides[0] + g % 8];"
    x = mx.arange(64).reshape(8, 8).astype(mx.float32)
    outcomes = []
    with harness.use():  # each launch has another layout
        for _ in range(12):
            try:
                y = launch(BuggyKernel(source, ""), x, ensure_row_contiguous=False)
                outcomes.append(bool((y == mx.arange(64)).all()))
            except harness.Fault:
                outcomes.append(False)
    assert not all(outcomes) and any(outcomes)
