"""Files are read up to a limit, and only regular ones."""

import os
import sys
from pathlib import Path

import pytest

from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import CheckpointError


def test_files_are_read_up_to_the_limit(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5, CheckpointError) == b"12345"
    with pytest.raises(CheckpointError, match="x has 5 B, the limit is 4 B"):
        read_bytes(path, 4, CheckpointError)
    if sys.platform == "linux":  # its size is 0
        with pytest.raises(CheckpointError, match="the limit is 4 B"):
            read_bytes(Path("/proc/self/status"), 4, CheckpointError)


def test_pipes_and_folders_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            read_bytes(path, 5, CheckpointError)
    with pytest.raises(CheckpointError, match="cannot read .*missing: No such file .*try: check the path"):
        read_bytes(tmp_path / "missing", 5, CheckpointError)


def test_utf8():
    assert decode_utf8(b"\xef\xbb\xbfa", "x", CheckpointError, None, "utf-8-sig") == "a"
    with pytest.raises(CheckpointError, match="x is not UTF-8: invalid start byte at byte 1 .try: a text"):
        decode_utf8(b"a\xff", "x", CheckpointError, "a text")
