"""Files of datasets on the Hugging Face hub, which are read while they are downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.hub import hub_errors, is_reachable
from mlxlm.utils.errors import DataError

PREFIX = "hf://"
_PATH = re.compile(r"hf://datasets/(?P<id>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<file>.+))?")
_EXAMPLE = "hf://datasets/OWNER/NAME, with @REVISION and /FILE if needed"
_SHARD = re.compile(r"[-_.]?\d{3,}([-_.]of[-_.]\d+)?([-_.][0-9a-f]{16})?$")  # of a name: "-00000-of-00004"
_NO_DATA = ("README.md", "dataset_infos.json")
_TRAIN = re.compile(r"(^|[^a-zA-Z])train([^a-zA-Z]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset.

    Attributes:
        name: Its address, as `hf://datasets/OWNER/NAME/FILE`.
        size: Its bytes.
    """

    name: str
    size: int

    def open(self, read_ahead: bool) -> Any:
        """Open the file for reading. Its parts are downloaded when they are read, with the megabytes behind or not."""
        import huggingface_hub

        with self.errors():
            cache_type = "readahead" if read_ahead else "none"
            return huggingface_hub.HfFileSystem().open(self.name, "rb", cache_type=cache_type)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn the errors of the hub into DataError."""
        with _dataset_errors(self.name):
            yield

    def __str__(self) -> str:
        return self.name


def is_hub_path(path: object) -> bool:
    """Whether this is the address of something on the hub."""
    return str(path).startswith(PREFIX)


def hub_files(path: str, suffixes: Collection[str]) -> list[HubFile]:
    """The files to read of a dataset on the hub.

    Args:
        path: `hf://datasets/OWNER/NAME`, with `@REVISION`, and `/FILE`, `/FOLDER` or a pattern such as `/data/a-*`. Of
            a dataset or a folder, the files of these suffixes are read; if some are named "train", only they are.
        suffixes: Suffixes of files that can be read.

    Raises:
        DataError: It is no such address, there are no such files, they are of several splits or configurations, the hub
            can't be reached, or access is denied.
    """
    if _PATH.fullmatch(path.rstrip("/")) is None:
        raise DataError(f"{path} is not the address of a dataset", _EXAMPLE)
    if not is_reachable():
        hint = platform.ALLOW_DOWNLOADS if platform.is_offline() else "a network connection"
        raise DataError(f"{path} can't be read: the Hugging Face hub can't be reached", hint)
    import huggingface_hub

    with _dataset_errors(path):
        file_system = huggingface_hub.HfFileSystem()
        find: Callable[..., Any] = file_system.glob if "*" in path else file_system.find
        found = [HubFile(PREFIX + name, entry["size"]) for name, entry in find(path, detail=True).items()]
    if len(found) == 1 and found[0].name == path:
        return found
    files = [file for file in found if file.name.lower().endswith(tuple(suffixes)) and not file.name.endswith(_NO_DATA)]
    if not files:
        raise DataError(f"{path} has no files to read", f"files with one of the suffixes {', '.join(suffixes)}")
    if "*" in path:
        return files
    files = [file for file in files if _TRAIN.search(file.name.removeprefix(path))] or files
    splits = list(dict.fromkeys(_split(file) for file in files))
    if len(splits) > 1:
        shown = " or ".join(splits[:10])
        raise DataError(f"{path} has files of several splits or configurations", f"one of them: {shown}")
    return files


def _split(file: HubFile) -> str:
    """A pattern for a file and its other shards."""
    path = PurePosixPath(file.name.removeprefix(PREFIX))
    suffix = "".join(path.suffixes[-2:] if path.suffix in (".gz", ".zst") else path.suffixes[-1:])
    stem = path.name.removesuffix(suffix)
    name = stem if (shard := _SHARD.search(stem)) is None else f"{stem[: shard.start()]}*"
    return f"{PREFIX}{path.with_name(name + suffix)}"


@contextmanager
def _dataset_errors(path: str) -> Iterator[None]:
    match = _PATH.match(path)
    assert match is not None
    with hub_errors(DataError, match["id"], match["revision"], "dataset"):
        yield
