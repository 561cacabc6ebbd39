"""What a process does differently that replaces one whose device has failed."""

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.cli.restart import restart_after
from mlxlm.utils.child_python import python_environment
from mlxlm.utils.errors import DeviceError

LIMITS = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")


def failure(out_of_memory):
    return DeviceError("failed", "again", out_of_memory=out_of_memory, results_lost=True)


@given(st.booleans(), st.integers(1, 300), st.lists(st.none() | st.integers(1, 100), min_size=2, max_size=2))
def test_each_restart_does_less_and_the_last_one_has_single_rows(out_of_memory, batch_size, limits):
    """Without progress. The bound is that of the default limits; larger ones of the user take longer."""
    changes = {name: str(limit) for name, limit in zip(LIMITS, limits, strict=True) if limit}
    with pytest.MonkeyPatch.context() as patch:
        for name in LIMITS:
            patch.delenv(name, raising=False)
        micro_batches, before, count = 1, None, 0
        while True:
            for name, value in changes.items():
                patch.setenv(name, value)
            values = {"micro_batches": micro_batches, "batch_size": batch_size}
            restart = restart_after(failure(out_of_memory), ["pretrain"], step=0, progress=False, **values)
            if restart is None:
                break
            changes, count = restart.changes, count + 1
            assert restart.arguments[:-1] == ["pretrain", "--micro-batches"]
            micro_batches = int(restart.arguments[-1])
            state = (*(-int(changes[name]) for name in LIMITS), micro_batches)
            assert before is None or state > before and all(a >= b for a, b in zip(state, before, strict=True))
            before = state
        assert micro_batches == batch_size
        assert count <= math.ceil(math.log2(batch_size)) + (0 if out_of_memory else 5)
        assert all(restart_after(failure(m), [], step=0, progress=True, **values) for m in (True, False))


def test_the_new_process_has_the_same_id_and_gives_the_exit_code(tmp_path):
    code = "import os; from mlxlm.cli.restart import Restart; print(os.getpid(), flush=True); Restart({}, {}).run()"
    code = code.format(["models", "--no-such-option"], {"MLX_MAX_OPS_PER_BUFFER": "20"})
    (tmp_path / "mlxlm.py").write_text("raise SystemExit('imported from the current folder')")
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(
        command, cwd=tmp_path, env=python_environment(), stdout=-1, stderr=-1, start_new_session=True
    ) as process:
        out, err = process.communicate()
    assert process.returncode == 2 and b"no option --no-such-option" in err
    assert int(out) == process.pid != os.getpid()
