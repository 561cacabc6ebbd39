"""Download a large file of the hub into its cache, and continue where an earlier download stopped.

huggingface_hub itself continues after a lost connection, but starts again in a new process, and its downloads of whole
repositories don't stop at Ctrl-C.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import commit_file

_SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of large files


def download_blob(repository: str, file: str, revision: str | None, blobs: Path) -> None:
    """Download a file to the folder where huggingface_hub looks for it, unless it is there or small.

    Raises:
        CheckpointError: Another process downloads it, it can't be written, or its digest is wrong.
    """
    from huggingface_hub import file_download
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, but not in __all__

    url = file_download.hf_hub_url(repository, file, revision=revision)
    metadata = file_download.get_hf_file_metadata(url)
    blob = blobs / (metadata.etag or "")
    if not _SHA256.fullmatch(blob.name) or blob.exists():
        return
    partial = blob.with_name(f"{blob.name}.incomplete")
    with os_errors_as(CheckpointError, "write", blob):
        blobs.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"another process is downloading {repository}", "again when it is done") from None
            size = out.tell()
            if size != metadata.size:
                headers = build_hf_headers()
                file_download.http_get(url, out, resume_size=size, headers=headers, expected_size=metadata.size)
            out.flush()
            os.fsync(out.fileno())
            if (digest := file_sha256(partial, CheckpointError)) != blob.name:
                partial.unlink()
                raise CheckpointError(f"{file} of {repository} arrived damaged: its SHA-256 is {digest}", "again")
            commit_file(partial, blob)
