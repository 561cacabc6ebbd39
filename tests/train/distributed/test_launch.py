"""What a launched process and its launcher do; tests of real runs are in test_process_group.py."""

import io
import os

import pytest

from mlxlm.train.distributed import launch
from mlxlm.train.distributed.launch import LaunchedProcesses, use_share


@pytest.mark.parametrize(
    ("cores", "num_processes", "shares"), [(4, 2, [{0, 1}, {2, 3}]), (3, 2, [{0}, {1, 2}]), (1, 2, [{0}] * 2)]
)
def test_processes_share_the_cores_of_a_machine(monkeypatch, cores, num_processes, shares):
    taken = []
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(launch.os, "sched_setaffinity", lambda pid, own: taken.append(set(own)), raising=False)
    for rank in range(num_processes):
        use_share(rank, num_processes)
    use_share(0, 1)
    assert taken == shares


def test_output_that_nobody_reads_is_read_from_the_processes_all_the_same():
    """They would wait while their pipe is full; and their exit codes are reported there, too."""
    reader, writer = os.pipe()
    os.close(reader)
    processes = LaunchedProcesses({"hosts": [{"ssh": "a"}, {"ssh": "b"}]}, "module", [])
    report = f"\x1e{processes._secret} 1 exit 0\n".encode()
    with open(writer, "wb") as target:
        processes.forward(io.BytesIO(b"step 1\nstep 2\n" + report), target)
    assert processes.exit_codes == {1: 0} and processes.exit_code == 1
