"""Helpers of the tests of the command line."""

import os
import shutil
import subprocess
import sys

from mlxlm.backend.compiled_kernels import kernel_folder
from mlxlm.backend.mlx import mx
from tests.run_command import run

QUICK = ["--steps", "6", "--batch-size", "4", "--max-seq-length", "32", "--vocab-size", "300"]
MLXLM = [sys.executable, "-m", "mlxlm.cli.main"]


def run_process(*arguments, **settings):
    """Run `mlxlm ARGUMENTS` in a process of its own."""
    command = [*MLXLM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **settings)


def error_line(*arguments) -> str:
    """Run a command that fails with exit code 1, nothing on stdout and one line of error, which is returned."""
    code, out, err = run(*arguments)
    assert code == 1 and out == "" and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


def dying_compiler(tmp_path, death):
    """The environment of a command that compiles a kernel of every model, with a g++ that runs `death` the first time.

    The other kernels are those that earlier commands have compiled.
    """
    compiled, folder = kernel_folder(mx.__version__), tmp_path / "tmp/mlx" / mx.__version__ / "cpu"
    folder.mkdir(parents=True)
    for kernel in compiled.glob("*.so"):
        if "LeftShift" not in kernel.name:  # of exp
            (folder / kernel.name).symlink_to(kernel)
    (tmp_path / "bin").mkdir()
    compiler, died = tmp_path / "bin/g++", tmp_path / "died"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *.so*) [ -e {died} ] || {{ touch {died}; {death}; }} ;; esac\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
