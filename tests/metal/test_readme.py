"""The example in the README of the harness, with a copy of the harness in another folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.metal import harness

FOLDER = Path(harness.__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")
LAST_SUM = "sum = simd_sum(sums[thread_index_in_simdgroup]);"
FIXES = [
    (LAST_SUM, f"threadgroup_barrier(mem_flags::mem_threadgroup);\n        {LAST_SUM}"),
    (
        LAST_SUM,
        LAST_SUM.replace("sums", "thread_index_in_simdgroup < simdgroups_per_threadgroup ? sums").replace(
            "])", "] : 0.0f)"
        ),
    ),
]


@pytest.mark.usefixtures("needs_harness")
def test_example(tmp_path):
    """The kernel, the kernel with the first fix, and with both fixes."""
    shutil.copytree(FOLDER, tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    conftest, kernel, test = (
        next(b for b in blocks if b.startswith(f"# {name}\n"))
        for name in ("conftest.py", "row_sum.py", "test_row_sum.py")
    )
    test += next(b for b in blocks if b.startswith("def test"))
    (tmp_path / "conftest.py").write_text(conftest)
    for i, (old, new) in enumerate([("", ""), *FIXES]):
        kernel = kernel.replace(old, new)
        (tmp_path / f"row_sum_{i}.py").write_text(kernel)
        (tmp_path / f"test_row_sum_{i}.py").write_text(test.replace("from row_sum", f"from row_sum_{i}"))

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8").stdout
    messages = re.findall(r"```\n(harness\.fault\.Fault: .*), at row_sum.metal:\d+\n```", README)
    assert len(messages) == 2 and all(message in output for message in messages), output
    assert "4 failed, 2 passed" in output
