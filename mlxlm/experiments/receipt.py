"""Receipts: what a model was trained on and how, so that anyone can train it again and compare.

The same kind of machine gives the same bits. Another BLAS or device adds the terms of a sum in another order, so that
the losses of a float32 run differ in the last bits, and the differences grow with each update. Between MKL and
OpenBLAS those of small-world differ by 1e-6 nats up to step 100, and by 5e-5 at step 156. In 10 steps of a smaller
model bfloat16 made 6e-4, a learning rate 1% higher 5e-3, another seed 0.26.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform as python_platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU
from mlxlm.checkpoint.locations import MODEL_FILE, best_checkpoint, read_checkpoint_state
from mlxlm.config.numbers import is_int, is_number
from mlxlm.data import DataOptions
from mlxlm.data.small_world.corpus import write_small_world
from mlxlm.evaluate.small_world import held_out_bits_per_byte
from mlxlm.families import config_from_hf, config_to_hf
from mlxlm.generation import load
from mlxlm.quantize import quantize
from mlxlm.report.log_entries import number, read_log_entries
from mlxlm.train import Run, start_run
from mlxlm.train.budget import Budget
from mlxlm.train.run import RECIPE_FILE, repeat_settings
from mlxlm.train.settings import REPEAT_PLAN_FILE, TokenizerOptions
from mlxlm.train.start import Phase, no_phase
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from mlxlm.utils.files import check_not_exists, working_folder, write_bytes
from mlxlm.utils.json_files import json_line, read_json_object, write_json

FILE_NAME = "receipt.json"
SCORE = "held_out_bits_per_byte"
TOKENIZER_FIELDS = {"tokenizer_type", "vocab_size"}  # of TokenizerOptions, that a recipe may set
_CORPUS_FILE = "small-world.jsonl"
_MAX_CORPUS = 1_000_000_000  # bytes
_MAX_BYTES = 32 << 20  # a run with a time limit has the learning rate of each step, about 30 bytes
MAX_LOSSES = 200  # of the first steps, which the receipt has one by one
_EARLY_STEPS = 20
LOSS_TOLERANCE, LATER_LOSS_TOLERANCE = 1e-3, 0.1  # nats, in the first `_EARLY_STEPS` steps and after them
BITS_TOLERANCE = 0.25  # of the bits per byte: in thousands of steps rounding may do as much as another seed, which
# made 12% in a small run of 300 steps
SCORE_TOLERANCE = 0.05  # of the bits per byte of held-out answers: in a speedrun of 3 minutes, 2,578 steps, OpenBLAS
# instead of MKL made 1.4%, and another seed, with another tokenizer, 3.2%


@dataclass(frozen=True)
class Recipe:
    """Everything but the machine that determines the weights of a model trained on the built-in corpus.

    A recipe with a time limit becomes one that determines the weights once its run has finished, see `Receipt.of_run`:
    it then has the learning rate of each step, which followed the clock.

    Attributes:
        num_bytes: Size of the corpus.
        seed: Of the corpus.
        config: The model, as a config.json. None: the best model for the minutes.
        settings: Fields of TrainSettings.
        tokenizer: "tokenizer_type" and "vocab_size" of TokenizerOptions; the size defaults to that of the model.
        minutes: Time limit, without the time for writing and tokenizing the corpus.
        learning_rates: Of each step of the run that is repeated.
        validations: The steps after which that run was validated.
    """

    num_bytes: int
    seed: int
    config: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    minutes: float | None = None
    learning_rates: Sequence[float] = ()
    validations: Sequence[int] = ()

    def start(self, out: Path, phase: Phase = no_phase) -> Run:
        """Write the corpus, train the tokenizer, tokenize the corpus, and make the run `out`.

        Raises:
            CheckpointError: `out` exists.
            ConfigError: The configuration or the settings can't be used.
            DataError: The disk can't be written.
        """
        config = None if self.config is None else config_from_hf(self.config, FILE_NAME)
        settings = {"dtype": "float32", **self.settings}
        minutes = None if self.learning_rates else self.minutes
        tokenizer = TokenizerOptions(**self.tokenizer)
        check_not_exists(out, CheckpointError, "another `out`")
        with working_folder(out.with_name(f"{out.name}.corpus")) as folder:
            corpus = folder / _CORPUS_FILE
            with phase("writing the corpus", self.num_bytes) as advance:
                write_small_world(corpus, self.num_bytes, self.seed, advance)
            digest, data = file_sha256(corpus, DataError), DataOptions([str(corpus)])
            budget = Budget(minutes=minutes, counts_preparation=False)
            run = start_run(out, data, config, tokenizer=tokenizer, budget=budget, settings=settings, phase=phase)
        write_json(run.path / RECIPE_FILE, {"recipe": asdict(self), "corpus_sha256": digest})
        if self.learning_rates:
            entries: list[dict[str, Any]] = [{"event": "step", "learning_rate": rate} for rate in self.learning_rates]
            entries += [{"event": "validation", "step": step} for step in self.validations]
            write_bytes(run.path / REPEAT_PLAN_FILE, b"".join(map(json_line, entries)))
        return run

    def repeating(self, run: Run) -> Recipe:
        """Return the recipe that repeats a finished run of this recipe, step by step.

        Raises:
            CheckpointError: The run hasn't finished, or was trained for longer than the recipe's minutes.
        """
        settings, limit = repeat_settings(run).to_dict(), run.settings.time_limit
        if self.minutes is None or self.learning_rates:
            return self
        if limit is None or limit > 60 * self.minutes:
            raise CheckpointError(f"{run.path} was trained for longer than {self.minutes:g} minutes", "a new speedrun")
        entries = list(read_log_entries(run.log_file))
        return replace(
            self,
            config=config_to_hf(run.config),
            settings=settings,
            tokenizer={**self.tokenizer, "vocab_size": run.config.vocab_size},
            learning_rates=[entry["learning_rate"] for entry in entries if entry["event"] == "step"],
            validations=[entry["step"] for entry in entries if entry["event"] == "validation"],
        )


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
            "weights_sha256", of a quantized model "quantized_sha256", "held_out_bits_per_byte" (see
            `held_out_bits_per_byte`), and for the record "log_sha256", "bits_per_byte" of the validation, "seconds" and
            "environment".
    """

    recipe: Recipe
    results: Mapping[str, Any]

    @classmethod
    def of_run(cls, run: Run, quantized: Path | None = None) -> Self:
        """Make the receipt of a finished run of a recipe, and of its quantized model.

        Raises:
            CheckpointError: The run hasn't finished, or a file can't be read.
            ConfigError: It isn't the run of a recipe.
        """
        planned, corpus_sha256 = read_recipe(run)
        recipe = planned.repeating(run)
        entries = list(read_log_entries(run.log_file))
        finished = next(entry for entry in entries if entry["event"] == "finished")
        results = {
            "corpus_sha256": corpus_sha256,
            "data_digest": run.data_digest,
            "losses": _losses(entries),
            "steps": finished["step"],
            "weights_sha256": file_sha256(run.path / MODEL_FILE, CheckpointError),
            "log_sha256": file_sha256(run.log_file, CheckpointError),
            "bits_per_byte": _bits_per_byte(run),
            SCORE: held_out_bits_per_byte(load(run.path)),
            "seconds": finished.get("seconds"),
            "environment": environment(),
        }
        if quantized is not None:
            results["quantized_sha256"] = file_sha256(quantized / MODEL_FILE, CheckpointError)
        return cls(recipe, results)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a receipt.json. Raises ConfigError that names the file and what is wrong."""
        values = read_json_object(path, _MAX_BYTES, ConfigError)
        try:
            recipe, results = Recipe(**values["recipe"]), values["results"]
            if values["sha256"] != _sha256(values):
                raise ConfigError(f"{path} has been changed: its content isn't that of its sha256", "an unchanged copy")
            losses, texts = results["losses"], [results[f"{n}_sha256"] for n in ("corpus", "weights")]
            objects = (recipe.settings, recipe.tokenizer, results["environment"])
            is_valid = (
                all(is_int(value) and value >= 0 for value in (recipe.num_bytes, recipe.seed, results["steps"]))
                and recipe.num_bytes <= _MAX_CORPUS
                and all(isinstance(value, dict) for value in (*objects, {} if recipe.minutes else recipe.config))
                and all(isinstance(text, str) for text in (*texts, results["data_digest"]))
                and all(isinstance(loss, float) for loss in losses)
                and all(is_number(rate) for rate in recipe.learning_rates)
                and all(is_int(step) for step in recipe.validations)
                and recipe.tokenizer.keys() <= TOKENIZER_FIELDS  # no path, nor a teacher: a receipt opens no other file
                and recipe.settings.get("teacher") is None
                and (recipe.minutes is None or len(recipe.learning_rates) == results["steps"])
                and losses
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a receipt: {error}") from None
        if not is_valid:
            raise ConfigError(f"{path} is not a receipt: a value has the wrong type, or is out of range")
        return cls(recipe, results)

    def compare(self, run: Run) -> Iterator[Comparison]:
        """Compare a run that the recipe started with this receipt.

        Yields:
            A comparison each for the corpus, the tokens and the losses of the steps that are done; of a finished run
            also for the weights; and for the bits per byte of the held-out answers and the quantized model, which is
            written into the run, if the receipt has them.

        Raises:
            CheckpointError: A file of the run can't be read.
        """
        expected, (recipe, corpus_sha256) = self.results, read_recipe(run)
        is_equal = corpus_sha256 == expected["corpus_sha256"]
        yield Comparison("corpus", "equal" if is_equal else "different", f"{recipe.num_bytes:,} bytes")
        is_equal = run.data_digest == expected["data_digest"]
        yield Comparison("tokenizer and tokens", "equal" if is_equal else "different", "the prepared data")
        entries = list(read_log_entries(run.log_file))
        yield _compare_losses(_losses(entries), expected["losses"])
        if not any(entry["event"] == "finished" for entry in entries):
            return
        bits, there = _bits_per_byte(run), number(expected.get("bits_per_byte"))
        is_close = abs(bits - there) <= BITS_TOLERANCE * there
        detail = f"{bits:.4f} bits per byte after {expected['steps']:,} steps, there {there:.4f}"
        weights = _compare_file("weights", run.path / MODEL_FILE, expected["weights_sha256"], detail, is_close)
        yield weights
        if SCORE in expected:
            bits, there = held_out_bits_per_byte(load(run.path)), number(expected[SCORE])
            allowed = 0.0 if weights.result == "equal" else SCORE_TOLERANCE  # equal weights have an equal score
            detail = f"{bits:.4f} bits per byte, there {there:.4f}"
            yield Comparison("held-out answers", _closeness(bits, there, allowed), detail)
        if "quantized_sha256" in expected:
            quantize(run.path, run.path / "4bit", bits=4, method="rtn")
            file, digest = run.path / "4bit" / MODEL_FILE, expected["quantized_sha256"]
            yield _compare_file("quantized model", file, digest, weights.detail, is_close)

    def to_dict(self) -> dict[str, Any]:
        """The receipt as JSON values, with their SHA-256."""
        values = {"recipe": asdict(self.recipe), "results": dict(self.results)}
        return {**values, "sha256": _sha256(values)}


def _sha256(values: Mapping[str, Any]) -> str:
    content = {name: values[name] for name in ("recipe", "results")}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_recipe(run: Run) -> tuple[Recipe, str]:
    """Return the recipe that started a run, and the SHA-256 of its corpus.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    path = run.path / RECIPE_FILE
    if not path.is_file():
        raise ConfigError(f"{run.path} wasn't made by mlxlm speedrun: it has no {RECIPE_FILE}")
    values = read_json_object(path, _MAX_BYTES, ConfigError)
    try:
        return Recipe(**values["recipe"]), values["corpus_sha256"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None


def environment() -> dict[str, Any]:
    """What decides how sums are rounded on this machine: its hardware, and the versions and sources of software."""
    return {
        "chip": platform.chip(),
        "cores": platform.cpu_cores(),
        "device": "CPU" if ON_CPU else "GPU",
        "blas": load_blas().name,
        "system": f"{python_platform.system()} {python_platform.machine()}",
        "mlx": version("mlx"),
        "mlxlm": version("mlxlm"),
        "source": _source_sha256()[:12],
    }


def _source_sha256() -> str:
    """SHA-256 of the Python files of this package: two checkouts of one version can differ."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _losses(entries: Iterable[Mapping[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in entries if entry["event"] == "step"][:MAX_LOSSES]


def _bits_per_byte(run: Run) -> float:
    best = best_checkpoint(run.path)
    return number(((read_checkpoint_state(best) if best else {}).get("best") or {}).get("bits_per_byte"))


def _compare_file(name: str, path: Path, digest: str, detail: str, is_close: bool = False) -> Comparison:
    is_equal = file_sha256(path, CheckpointError) == digest
    return Comparison(name, "equal" if is_equal else "close" if is_close else "different", detail)


def _closeness(value: float, expected: float, tolerance: float) -> Literal["equal", "close", "different"]:
    if math.isclose(value, expected, rel_tol=1e-9):
        return "equal"
    return "close" if abs(value - expected) <= tolerance * expected else "different"


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
