"""`mlxlm small-world`: write the built-in corpus to a file."""

from __future__ import annotations

from pathlib import Path

import click

from mlxlm.cli import render
from mlxlm.cli.options import PATH, SIZE, SectionedCommand, option
from mlxlm.utils.formatting import human_bytes


@click.command("small-world", cls=SectionedCommand)
@option("Output", "--out", PATH, "New .jsonl file.", required=True)
@option("Output", "--size", SIZE, "Size of the file.", default="5MB", metavar="SIZE")
@option("Output", "--seed", int, "Random seed. Another seed gives other conversations.", default=0)
def small_world(out: Path, size: int, seed: int) -> None:
    """Write conversations in simple English, to train a small model on.

    They tell stories, answer questions about them, add and sort numbers, spell, and find opposites. Each line is
    {"messages": [{"role": "user", "content": "..."}, ...]}. A tenth of all combinations of words is held out: `mlxlm
    evaluate MODEL --small-world` asks about these.
    """
    from mlxlm.data.small_world.corpus import write_small_world

    with render.bytes_progress("Writing", size) as advance:
        write_small_world(out, size, seed, advance)
    render.say(f"wrote {human_bytes(out.stat().st_size)}")
    render.result(str(out))
