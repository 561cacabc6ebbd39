"""Receipts: what a model was trained on and how, so that anyone can train it again and compare.

The same kind of machine gives the same bits. Another BLAS or device adds the terms of a sum in another order, so that
the losses of a float32 run differ in the last bits, and the differences grow with each update. Between MKL and
OpenBLAS those of small-world differ by 1e-6 nats up to step 100, and by 5e-5 at step 156. In 10 steps of a smaller
model bfloat16 made 6e-4, a learning rate 1% higher 5e-3, another seed 0.26.
"""

from __future__ import annotations

import platform as python_platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU
from mlxlm.checkpoint.locations import MODEL_FILE, best_checkpoint, read_checkpoint_state
from mlxlm.data import DataOptions
from mlxlm.data.small_world.corpus import write_small_world
from mlxlm.families import config_from_hf
from mlxlm.quantize import quantize
from mlxlm.report.log_entries import number, read_log_entries
from mlxlm.train import Run, start_run
from mlxlm.train.start import Phase, no_phase
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.json_files import read_json_object

FILE_NAME = "receipt.json"
_CORPUS_FILE = "small-world.jsonl"
_MAX_BYTES = 1 << 20
MAX_LOSSES = 200  # of the first steps, which the receipt has one by one
_EARLY_STEPS = 20
LOSS_TOLERANCE, LATER_LOSS_TOLERANCE = 1e-3, 0.1  # nats, in the first `_EARLY_STEPS` steps and after them
BITS_TOLERANCE = 0.25  # of the bits per byte: in thousands of steps rounding may do as much as another seed, which
# made 12% in a small run of 300 steps


@dataclass(frozen=True)
class Recipe:
    """Everything but the machine that determines the weights of a model trained on the built-in corpus.

    Attributes:
        num_bytes: Size of the corpus.
        seed: Of the corpus.
        config: The model, as a config.json. The tokenizer has its vocabulary size.
        settings: Fields of TrainSettings.
    """

    num_bytes: int
    seed: int
    config: Mapping[str, Any]
    settings: Mapping[str, Any]

    def start(self, folder: Path, phase: Phase = no_phase) -> Run:
        """Write the corpus into the new `folder`, train the tokenizer, and make the run `folder/run`.

        Raises:
            DataError: `folder` has a corpus already, or can't be written.
            ConfigError: The configuration or the settings can't be used.
        """
        corpus = folder / _CORPUS_FILE
        with phase("writing the corpus", self.num_bytes) as advance:
            write_small_world(corpus, self.num_bytes, self.seed, advance)
        config, settings = config_from_hf(self.config, FILE_NAME), {"dtype": "float32", **self.settings}
        return start_run(folder / "run", DataOptions([str(corpus)]), config, settings=settings, phase=phase)


@dataclass(frozen=True)
class Comparison:
    """One comparison of a repeated training with its receipt.

    Attributes:
        name: What was compared.
        result: "equal" to the bit, "close" (within the tolerance) or "different".
        detail: One phrase.
    """

    name: str
    result: Literal["equal", "close", "different"]
    detail: str


@dataclass(frozen=True)
class Receipt:
    """A recipe and what it gave.

    Attributes:
        recipe: What determines the weights.
        results: "corpus_sha256", "data_digest" (of the token shards), "losses" (of the first steps, exact), "steps",
            "weights_sha256", "quantized_sha256", and for the record "log_sha256", "bits_per_byte", "seconds",
            "environment" and "versions".
    """

    recipe: Recipe
    results: Mapping[str, Any]

    @classmethod
    def of_run(cls, recipe: Recipe, run: Run, quantized: Path, commit: str) -> Self:
        """Make the receipt of a finished run and its quantized model."""
        entries = list(read_log_entries(run.log_file))
        finished = next((entry for entry in entries if entry["event"] == "finished"), None)
        best = best_checkpoint(run.path)
        if finished is None or best is None:
            raise CheckpointError(f"{run.path} hasn't finished", run.resume_command)
        results = {
            "corpus_sha256": file_sha256(run.path.parent / _CORPUS_FILE, CheckpointError),
            "data_digest": run.data_digest,
            "losses": _losses(entries),
            "steps": finished["step"],
            "weights_sha256": file_sha256(run.path / MODEL_FILE, CheckpointError),
            "quantized_sha256": file_sha256(quantized / MODEL_FILE, CheckpointError),
            "log_sha256": file_sha256(run.log_file, CheckpointError),
            "bits_per_byte": _bits_per_byte(run),
            "seconds": finished.get("seconds"),
            "environment": environment(),
            "versions": {"mlxlm": version("mlxlm"), "commit": commit, "mlx": version("mlx")},
        }
        return cls(recipe, results)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a receipt.json. Raises ConfigError that names the file and what is wrong."""
        values = read_json_object(path, _MAX_BYTES, ConfigError)
        try:
            recipe, results = Recipe(**values["recipe"]), values["results"]
            losses, steps = results["losses"], results["steps"]
            texts = [results[name] for name in ("corpus_sha256", "data_digest", "weights_sha256", "quantized_sha256")]
            is_valid = (
                all(isinstance(value, int) and value >= 0 for value in (recipe.num_bytes, recipe.seed, steps))
                and all(isinstance(value, dict) for value in (recipe.config, recipe.settings, results["environment"]))
                and all(isinstance(text, str) for text in texts)
                and all(isinstance(loss, float) for loss in losses)
                and losses
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a receipt: {error}") from None
        if not is_valid:
            raise ConfigError(f"{path} is not a receipt: a value has the wrong type")
        return cls(recipe, results)

    def compare(self, run: Run) -> Iterator[Comparison]:
        """Compare a run that the recipe started with this receipt.

        Yields:
            A comparison each for the corpus, the tokens and the losses of the steps that are done; of a finished run
            also for the weights and the quantized model, which is written into the run.

        Raises:
            CheckpointError: A file of the run can't be read.
        """
        expected, corpus = self.results, run.path.parent / _CORPUS_FILE
        yield _compare_file("corpus", corpus, expected["corpus_sha256"], f"{corpus.stat().st_size:,} bytes")
        is_equal = run.data_digest == expected["data_digest"]
        yield Comparison("tokenizer and tokens", "equal" if is_equal else "different", "the prepared data")
        entries = list(read_log_entries(run.log_file))
        yield _compare_losses(_losses(entries), expected["losses"])
        if any(entry["event"] == "finished" for entry in entries):
            quantize(run.path, run.path / "4bit", bits=4)
            bits, there = _bits_per_byte(run), number(expected.get("bits_per_byte"))
            is_close = abs(bits - there) <= BITS_TOLERANCE * there
            detail = f"{bits:.4f} bits per byte after {expected['steps']:,} steps, there {there:.4f}"
            for name, folder, key in (
                ("weights", run.path, "weights_sha256"),
                ("quantized model", run.path / "4bit", "quantized_sha256"),
            ):
                yield _compare_file(name, folder / MODEL_FILE, expected[key], detail, is_close)

    def to_dict(self) -> dict[str, Any]:
        """The receipt as JSON values."""
        return {"recipe": vars(self.recipe), "results": dict(self.results)}


def environment() -> dict[str, Any]:
    """What decides how sums are rounded on this machine."""
    return {
        "chip": platform.chip(),
        "cores": platform.cpu_cores(),
        "device": "CPU" if ON_CPU else "GPU",
        "blas": load_blas().name,
        "system": f"{python_platform.system()} {python_platform.machine()}",
        "mlx": version("mlx"),
    }


def _losses(entries: Iterable[Mapping[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in entries if entry["event"] == "step"][:MAX_LOSSES]


def _bits_per_byte(run: Run) -> float:
    best = best_checkpoint(run.path)
    return number(((read_checkpoint_state(best) if best else {}).get("best") or {}).get("bits_per_byte"))


def _compare_file(name: str, path: Path, digest: str, detail: str, is_close: bool = False) -> Comparison:
    is_equal = file_sha256(path, CheckpointError) == digest
    return Comparison(name, "equal" if is_equal else "close" if is_close else "different", detail)


def _compare_losses(losses: list[float], expected: list[float]) -> Comparison:
    differences = [abs(loss - other) for loss, other in zip(losses, expected, strict=False)]
    first = next((step for step, difference in enumerate(differences, 1) if difference), None)
    if first is None:
        return Comparison("losses", "equal" if differences else "different", f"of the first {len(differences)} steps")
    early, later = differences[:_EARLY_STEPS], differences[_EARLY_STEPS:]
    is_close = all(x <= LOSS_TOLERANCE for x in early) and all(x <= LATER_LOSS_TOLERANCE for x in later)
    allowed = f"{LOSS_TOLERANCE} up to step {_EARLY_STEPS}, {LATER_LOSS_TOLERANCE} after it"
    detail = f"from step {first} of {len(differences)}, by at most {max(differences):.2g} nats (allowed: {allowed})"
    return Comparison("losses", "close" if is_close else "different", detail)
