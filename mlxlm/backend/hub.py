"""Access to the Hugging Face hub: whether it can be reached, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mlxlm.backend import platform
from mlxlm.utils.errors import MlxlmError

_TIMEOUT = 5.0  # seconds


def is_reachable() -> bool:
    """Whether downloads are allowed and the hub answers within seconds; huggingface_hub retries for half a minute."""
    if platform.is_offline():
        return False
    from huggingface_hub import constants, get_session

    with suppress(Exception):  # whatever its HTTP client raises
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
        return True
    return False


@contextmanager
def hub_errors(
    error_type: type[MlxlmError], repository: str, revision: str | None = None, kind: str = "model"
) -> Iterator[None]:
    """Turn the errors of huggingface_hub into `error_type`, about a repository of this kind: "model" or "dataset"."""
    from huggingface_hub import errors

    id, hint = f"{repository}@{revision}" if revision else repository, None
    try:
        yield
        return
    except MlxlmError:
        raise
    except Exception as raised:  # whatever its HTTP client and file locks raise
        # Its file system has the error as the cause.
        error = raised.__cause__ if isinstance(raised.__cause__, errors.HfHubHTTPError) else raised
    if isinstance(error, errors.GatedRepoError):
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repository}"
        problem, hint = f"{id} is gated", f"request access at {page}, then hf auth login"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"there is no path {id}, nor a {kind} of this name on the hub"
        hint = "check the spelling, or hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem, hint = f"{repository} has no revision {revision}", "one of its branches, tags or commits"
    elif isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        partly = platform.cached_repository(repository).is_dir()
        place = "not completely in the cache" if partly else "neither a path nor in the cache"
        problem = f"{id} is {place}, and the hub can't be reached"
        hint = platform.ALLOW_DOWNLOADS if platform.is_offline() else f"a network connection, or the path of a {kind}"
    else:
        problem = f"{id} can't be downloaded: {' '.join(str(error).split()) or type(error).__name__}"
    raise error_type(problem, hint)
