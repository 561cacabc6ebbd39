"""One quantization from its settings to its report, in steps."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx
from mlxlm.checkpoint import huggingface
from mlxlm.checkpoint.carry import carry_tokenizer
from mlxlm.checkpoint.layout import locate
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.source import Checkpoint, open_checkpoint
from mlxlm.checkpoint.stored import as_stored
from mlxlm.checkpoint.tensors import Tensor, Tensors
from mlxlm.compare import Comparison, compare
from mlxlm.errors import ConfigError
from mlxlm.families import layout
from mlxlm.generation.engine import Context, tokens
from mlxlm.quantize import search, text
from mlxlm.quantize.calibrated import EMBEDDING, calibrated, check_method
from mlxlm.quantize.packed import Packed, dequantized
from mlxlm.quantize.plan import Format, Plan, recipe, uniform
from mlxlm.quantize.report import Measured, Report
from mlxlm.quantize.stream import halved, output_dtype, quantized

# Told (phase, done, total).
Progress = Callable[[str, int, int], None]

_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding
_PROMPT, _DECODED, _WARM = 16, 48, 8  # tokens of the speed measurement; the first are not counted


@dataclass(frozen=True)
class Goal:
    """What decides the bits: the same for all, a recipe by name, or a search that ends at a size in bytes, at bits
    per weight, or at a KL divergence in nats per token."""

    format: Format
    recipe: str | None = None
    budget: int | None = None
    bits_per_weight: float | None = None
    max_kl: float | None = None

    @property
    def searches(self) -> bool:
        return (self.budget, self.bits_per_weight, self.max_kl) != (None, None, None)

    def check(self) -> None:
        """Raises ConfigError for goals that exclude each other, and for impossible numbers."""
        given = [n for n in ("recipe", "budget", "bits_per_weight", "max_kl") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both decide the bits", "one of them")
        if given and not self.format.affine:
            raise ConfigError(f"{given[0]} needs bits to choose from, {self.format.mode} has none", "the affine mode")
        for name in ("budget", "bits_per_weight", "max_kl"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}, it must be a positive number")


@dataclass(frozen=True)
class Made:
    tensors: Tensors
    errors: dict[str, float]  # filled while the tensors are read, where there is no calibration


class Job:
    """One quantization: what it needs from the source, and its parts in their order."""

    def __init__(self, checkpoint: Checkpoint, goal: Goal, method: str, measure: bool, tell: Progress):
        self._begun = time.monotonic()
        self.source, self.goal, self.method, self.measures, self.tell = checkpoint, goal, method, measure, tell
        self.config = checkpoint.config
        self.parameters = sum(math.prod(t.shape) for t in checkpoint.tensors.values())
        self.plan = self._plan()
        check_method(method, self.plan)
        self.dtype = output_dtype(checkpoint.tensors)
        self.halved = replace(checkpoint, tensors=halved(checkpoint.tensors, self.dtype))
        self.calibration: text.Text | None = None
        self.evaluation: text.Text | None = None
        self.calibrates = method != "round" or goal.searches

    def _plan(self) -> Plan:
        if self.goal.recipe is not None:
            return recipe(self.config, self.source.tensors, self.goal.recipe, self.goal.format.group_size)
        return uniform(self.config, self.source.tensors, self.goal.format)

    def read_texts(self, calibration: Path | str | None, evaluation: Path | str | None) -> None:
        """Raises ConfigError for a text that nothing would read."""
        needed = self.measures or self.goal.max_kl is not None
        if calibration is not None and not self.calibrates:
            raise ConfigError(
                "a calibration text has no effect on plain rounding", "method gptq, or an evaluation text"
            )
        if evaluation is not None and not needed:
            raise ConfigError("an evaluation text has no effect without measuring", "leaving it out")
        if not (self.calibrates or needed):
            return
        root = locate(self.source.path).root if self.source.path.is_dir() else None
        pair = text.calibration_and_evaluation(root, self.source.load_tokenizer(), calibration, evaluation)
        self.calibration = pair[0] if self.calibrates else None
        self.evaluation = pair[1] if needed else None

    def make(self, scratch: Path) -> tuple[Plan, Made]:
        """The plan, searched for where that is asked, and its tensors."""
        if not self.goal.searches:
            return self.plan, self._quantized(self.plan, scratch)
        windows = self._windows()
        total = sum(chosen is not None for chosen in map(self.plan.format_of, self.plan.matrices))
        told = _counter(self.tell, "measuring each matrix", total)
        found = search.costs(self.halved, self.plan, windows, told)
        if self.goal.max_kl is None:
            plan = self._within(found)
            return plan, self._quantized(plan, scratch)
        made: dict[int, Made] = {}

        def divergence(plan: Plan) -> float:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            made[plan.nbytes()] = result = self._quantized(plan, folder)
            return self._compared(self._checkpoint(plan, result.tensors)).kl

        plan = search.below_divergence(self.plan, found, self.goal.max_kl, divergence)
        return plan, made[plan.nbytes()]

    def _within(self, found: search.Costs) -> Plan:
        """The plan that a search for a size ends at. Raises ConfigError naming the smallest size possible."""
        matrices = {f"{module}.weight" for m in self.plan.matrices for module in m.modules}
        others = sum(t.nbytes for name, t in self.halved.tensors.items() if name not in matrices)
        smallest = search.steps(self.plan, found)[0]
        if self.goal.bits_per_weight is not None:
            limit = math.floor(self.goal.bits_per_weight * self.parameters / 8) - others
            if limit < smallest.nbytes():
                least = math.ceil(800 * (smallest.nbytes() + others) / self.parameters) / 100
                raise ConfigError(
                    f"{self.goal.bits_per_weight:g} bits per weight can't be reached",
                    f"{least} or more, or larger groups",
                )
            return search.within(self.plan, found, limit)
        plan, rest = smallest, others + self._beside(smallest)
        if self.goal.budget < plan.nbytes() + rest:
            least = plan.nbytes() + rest
            raise ConfigError(f"{self.goal.budget} bytes can't be reached", f"{least} or more, or larger groups")
        for _ in range(3):  # what lies beside the tensors depends on the plan, a little
            larger = search.within(self.plan, found, max(plan.nbytes(), self.goal.budget - rest))
            rest = others + self._beside(larger)
            if larger.nbytes() + rest <= self.goal.budget:
                return larger
        return plan

    def _beside(self, plan: Plan) -> int:
        """An upper bound of what the folder has beside the values of tensors: headers, configuration, tokenizer."""
        config = self.config.with_changes(quantization=plan.entry())
        stored = as_stored(layout(config, for_mlx=True), quantized(self.halved.tensors, plan))
        largest = sum(tensor.nbytes for tensor in stored.values())
        header = sum(
            len(json.dumps({name: {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [largest, largest]}}))
            for name, tensor in stored.items()
        )
        index = sum(len(name) + 60 for name in stored) if largest > huggingface.SHARD_BYTES else 0
        values = json.dumps({**self.source.values, **config.to_dict()}, indent=2, default=str)
        with tempfile.TemporaryDirectory() as folder:
            carry_tokenizer(self.source, Path(folder))
            tokenizer = sum(file.stat().st_size for file in Path(folder).iterdir())
        return header + index + len(values.encode("utf-8")) + tokenizer + _MARGIN

    def _windows(self) -> np.ndarray:
        length = min(text.WINDOW, self.config.max_position_embeddings)
        return self.calibration.windows(length, text.CALIBRATION)

    def _quantized(self, plan: Plan, scratch: Path) -> Made:
        if self.method == "round":
            errors: dict[str, float] = {}

            def on_matrix(module: str, weight: mx.array, packed: Packed, chosen: Format) -> None:
                errors[module] = _relative(weight, dequantized(packed, chosen))

            return Made(quantized(self.halved.tensors, plan, on_matrix), errors)
        layers, tied = self.config.num_hidden_layers, self.config.tie_word_embeddings
        twice = tied and plan.formats[EMBEDDING] is not None
        told = _counter(self.tell, f"calibrating ({self.method})", layers * (1 + twice) + (not tied))
        result = calibrated(self.halved, plan, self.method, self._windows(), scratch, told)
        return Made(result.tensors, result.errors)

    def _checkpoint(self, plan: Plan, tensors: Tensors) -> Checkpoint:
        return replace(self.source, config=self.config.with_changes(quantization=plan.entry()), tensors=tensors)

    def _compared(self, result: Checkpoint) -> Comparison:
        def told(done: int, total: int) -> None:
            self.tell("comparing with the source", done, total)

        ids = self.evaluation.tokens.tolist()
        return compare(self.source, result, ids, text_bytes=self.evaluation.bytes, progress=told)

    def write(self, folder: Path, plan: Plan, made: Made) -> list[str]:
        """The files of the model; returns warnings."""
        config = self.config.with_changes(quantization=plan.entry())
        total = sum(tensor.nbytes for tensor in made.tensors.values())
        done = 0

        def counted(tensor: Tensor) -> Tensor:
            def count(value: mx.array) -> mx.array:
                nonlocal done
                done += tensor.nbytes
                self.tell("writing", done, total)
                return value

            return tensor.then(count)

        tensors = {name: counted(tensor) for name, tensor in made.tensors.items()}
        huggingface.write(folder, self.source.values, config, tensors, None)
        return carry_tokenizer(self.source, folder)

    def report(self, source: str, out: Path, folder: Path, plan: Plan, made: Made, warnings: list[str]) -> Report:
        """Read back what was written, and measure it."""
        again = open_checkpoint(folder)
        files = [file for file in folder.iterdir() if file.is_file()]
        before, after = (sum(t.nbytes for t in c.tensors.values()) for c in (self.source, again))
        return Report(
            source=source,
            path=str(out),
            method=self.method,
            dtype=str(self.dtype).removeprefix("mlx.core."),
            parameters=self.parameters,
            source_bytes=before,
            bytes=sum(file.stat().st_size for file in files),
            source_bits_per_weight=8 * before / self.parameters,
            bits_per_weight=8 * after / self.parameters,
            formats=plan.to_dict(),
            regrouped=dict(plan.regrouped),
            skipped=dict(plan.skipped),
            bits={module: chosen.bits for module, chosen in plan.formats.items() if chosen is not None},
            errors=made.errors,
            error_of="weights" if self.method == "round" else "outputs",
            calibration=self.calibration.name if self.calibration else None,
            measured=self._measured(again) if self.measures else None,
            seconds=time.monotonic() - self._begun,
            warnings=warnings,
        )

    def _measured(self, again: Checkpoint) -> Measured:
        said = self._compared(again)
        prompt = self.evaluation.tokens[:_PROMPT].tolist()
        speeds = []
        for done, checkpoint in enumerate((self.source, again)):
            self.tell("measuring speed", done, 2)
            speeds.append(decode_speed(checkpoint, prompt))
        return Measured(
            text=self.evaluation.name,
            tokens=said.tokens,
            kl=said.kl,
            top1=said.top1,
            bits_per_byte_before=said.bits_per_byte_a,
            bits_per_byte_after=said.bits_per_byte_b,
            hidden=said.layers,
            speed_before=speeds[0],
            speed_after=speeds[1],
        )


def decode_speed(checkpoint: Checkpoint, prompt: Sequence[int]) -> float | None:
    """Tokens per second after the first ones of `prompt`'s continuation; None where the model doesn't fit."""
    bytes_per_weight = 4 if ON_CPU else 2
    if bytes_per_weight * checkpoint.config.parameter_count() > 0.6 * platform.total_memory():
        return None
    model, config = load_checkpoint(checkpoint)
    count = min(_DECODED, config.max_position_embeddings - len(prompt) - 1)
    if count <= _WARM:
        return None
    begun = 0.0
    for i, _ in enumerate(tokens(Context(model), prompt, lambda logits: mx.argmax(logits, axis=-1), count)):
        if i == _WARM:
            begun = time.monotonic()
    return (count - 1 - _WARM) / (time.monotonic() - begun)


def _relative(weight: mx.array, changed: mx.array) -> float:
    """|changed - weight| / |weight|"""
    source = weight.astype(mx.float32).flatten()
    apart = changed.flatten() - source
    size = (source @ source).item()
    return math.sqrt((apart @ apart).item() / size) if size else 0.0


def _counter(tell: Progress, phase: str, total: int) -> Callable[[str], None]:
    """Told one thing that is done at a time."""
    done = 0

    def advance(_name: str) -> None:
        nonlocal done
        done += 1
        tell(phase, done, total)

    return advance
