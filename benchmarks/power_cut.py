"""Kills `mlxlm pretrain` at random moments and resumes it until it is done.

The result is compared with an uninterrupted run, bit for bit.

    python benchmarks/power_cut.py [--kills 50] [--seed 0] [--steps 1500] [--image]

A third of the kills come at any time after the start, a third in the middle of steps, a third while a checkpoint is
written. A run that finishes before the last kill is compared, and another one begins.

`--image` (Linux, as root) simulates power cuts: the run is on an ext4 file system in a file, and after each kill
continues on a copy of that file, without what the kernel had not yet written: names and contents that were not flushed
are lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import report

MODEL = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 300, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
COMMAND = [sys.executable, "-c", "from mlxlm.cli.main import main; main()"]
MEGABYTES = 64  # of the image


class Folder:
    """The folder of a run. A cut keeps everything that the process has written."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()

    def cut(self) -> None:
        pass

    def close(self) -> None:
        pass


class Image(Folder):
    """An ext4 file system in a file. A cut keeps what has reached the file."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._file = path.with_suffix(".img")
        with self._file.open("wb") as file:
            file.truncate(MEGABYTES << 20)
        subprocess.run(["mkfs.ext4", "-q", str(self._file)], check=True)
        self._mount()

    def _mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self._file), str(self.path)], check=True)

    def cut(self) -> None:
        left = self._file.with_suffix(".left")
        shutil.copyfile(self._file, left)
        self.close()  # flushes to the old file, which is replaced
        left.replace(self._file)
        self._mount()

    def close(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--image", action="store_true", help="also lose what was not flushed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(Path(temporary), options)
    rows = [
        ("kills", f"{options.kills}, seed {options.seed}, {'power cuts' if options.image else 'kill -9'}"),
        *((f"  {moment}", str(count)) for moment, count in sorted(result["moments"].items())),
        ("runs finished", str(result["runs"])),
        ("equal to the bit", str(result["equal"])),
        ("every step logged once", str(result["logged_once"])),
        ("left behind", ", ".join(result["litter"]) or "nothing"),
    ]
    report(f"power cuts in runs of {options.steps} steps", rows, {"benchmark": "power_cut", **vars(options), **result})
    if result["litter"] or not result["equal"] == result["logged_once"] == result["runs"]:
        raise SystemExit(1)


def measure(folder: Path, options: argparse.Namespace) -> dict:
    rng = random.Random(options.seed)
    text, config, prepared = folder / "text.txt", folder / "config.json", folder / "prepared"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "birds", "in", "old", "gardens"]
    text.write_text("\n".join(" ".join(rng.choices(words, k=9)) for _ in range(2000)))
    config.write_text(json.dumps(MODEL))
    for command in (
        ["tokenizer", "train", str(text), "--vocab-size", "300", "--out", str(folder / "tokenizer")],
        ["prepare", str(text), "--tokenizer", str(folder / "tokenizer"), "--out", str(prepared)],
    ):
        subprocess.run([*COMMAND, *command], check=True, capture_output=True)
    begin = [
        "pretrain", str(prepared), "--config", str(config), "--steps", str(options.steps), "--batch-size", "2",
        "--max-seq-length", "32", "--save-every", "7", "--eval-every", "50", "--eval-tokens", "500",
        "--dropout", "0.1", "--grad-accumulation-steps", "2",
    ]  # fmt: skip
    whole = folder / "whole"
    subprocess.run([*COMMAND, *begin, "--out", str(whole)], check=True, stdout=subprocess.DEVNULL)
    moments: Counter[str] = Counter()
    litter: set[str] = set()
    runs = equal = once = kills = 0
    while kills < options.kills:
        place = (Image if options.image else Folder)(folder / f"place-{runs}")
        run = place.path / "run"
        done = False
        while not done:
            began = (run / "train.json").exists()
            command = ["pretrain", "--resume", str(run)] if began else [*begin, "--out", str(run)]
            how = rng.choice(["any", "step", "save"]) if kills < options.kills else None
            done, moment = killed(command, run, how, rng)
            if not done:
                place.cut()
                kills += 1
                moments[moment] += 1
                print(f"kill {kills}: {moment}, {last_step(run)} steps are logged", file=sys.stderr)
        runs += 1
        equal += contents(run) == contents(whole)
        once += logged(run) == logged(whole)
        litter |= {re_named(p.name) for p in [*place.path.glob(".*"), *(run / "checkpoints").glob(".*")]}
        place.close()
    return {"moments": dict(moments), "runs": runs, "equal": equal, "logged_once": once, "litter": sorted(litter)}


def killed(command: list[str], run: Path, how: str | None, rng: random.Random) -> tuple[bool, str]:
    """Start `command` and kill it: whether it was done before, and when it was killed. Raises where it failed."""
    before = last_step(run)
    process = subprocess.Popen([*COMMAND, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    os.set_blocking(process.stderr.fileno(), False)
    wait = rng.uniform(0, 3)
    deadline = None if how is None else time.monotonic() + wait if how == "any" else None
    while process.poll() is None:
        if how in ("step", "save") and deadline is None and last_step(run) > before:
            if how == "step":
                deadline = time.monotonic() + rng.uniform(0, 1)
            elif any((run / "checkpoints").glob(".*.partial")):
                deadline = time.monotonic() + rng.uniform(0, 0.004)
        if deadline is not None and time.monotonic() >= deadline:
            process.kill()
            break
        time.sleep(0.002)
    process.wait()
    said = process.stderr.read() or ""
    process.stderr.close()
    if process.returncode == 0:
        return True, ""
    if process.returncode != -9:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}:\n{said}")
    if not run.exists():
        return False, "before the run was there"
    if any((run / "checkpoints").glob(".*.partial")):
        return False, "while a checkpoint was written"
    if any((run / "checkpoints").glob(".*.old")):
        return False, "while a checkpoint was removed"
    return False, "in training" if last_step(run) > before else "while it started"


def last_step(run: Path) -> int:
    """Of the log; 0 without one."""
    try:
        with (run / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            lines = file.read().split(b"\n")[:-1]
        return max((json.loads(line)["step"] for line in lines[1:]), default=0)
    except (OSError, ValueError, KeyError):
        return 0


def contents(run: Path) -> list[bytes]:
    last = max((run / "checkpoints").glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))
    return [last.name.encode(), *((last / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer"))]


def logged(run: Path) -> list[tuple]:
    """Steps and validations with their losses, in order."""
    entries = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [(e["event"], e["step"], e["loss"]) for e in entries if e["event"] in ("step", "validation")]


def re_named(name: str) -> str:
    """A name of litter without its random part."""
    return "." + name.strip(".").split(".")[0] + (".partial" if name.endswith(".partial") else ".…")


if __name__ == "__main__":
    main()
