"""Child processes that run Python import nothing from the current folder."""

import re
import subprocess

from mlxlm.doctor.worker import _COMMAND
from mlxlm.utils.child_python import python_environment
from tests.paths import ROOT


def test_one_function_builds_the_command_of_every_child_process_that_runs_python():
    starts = re.compile(r"sys\.executable[,\]]|multiprocessing import (Process|Pool)|ProcessPool|os\.(fork|spawn|exec)")
    files = [path.name for path in (ROOT / "mlxlm").rglob("*.py") if starts.search(path.read_text("utf-8"))]
    assert files == ["child_python.py"]


def test_files_in_the_current_folder_are_not_imported(tmp_path):
    for name in ("json", "psutil", "mlxlm"):
        (tmp_path / f"{name}.py").write_text("import os; os.abort()")
    run = subprocess.run(_COMMAND, cwd=tmp_path, env=python_environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "not enough values to unpack" in run.stderr  # the child has begun
