"""One quantization from its settings to its report, in steps."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import huggingface
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import UNQUANTIZED_DTYPES, LazyTensor, LazyTensors, with_read_progress
from mlxlm.checkpoint.locations import locate
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.tokenizer_files import copy_tokenizer
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.convert.compare import Comparison, compare
from mlxlm.families import config_to_hf, weight_mappings
from mlxlm.quantize import bit_search, text
from mlxlm.quantize.calibrated_methods import EMBEDDING, HEAD, check_method, quantize_calibrated
from mlxlm.quantize.check import checks, checksum
from mlxlm.quantize.lazy_quantize import cast_to_16bit, output_dtype, quantized
from mlxlm.quantize.packed_matrix import PackedMatrix, relative_error
from mlxlm.quantize.quantization_plan import GROUP_SIZES, Format, QuantizationPlan, recipe, uniform
from mlxlm.quantize.report import QuantizationMetrics, QuantizationReport
from mlxlm.quantize.speed import decode_speeds
from mlxlm.utils.errors import CheckpointError, ConfigError, TokenizerError

# Told (phase, done, total).
Progress = Callable[[str, int, int], None]

_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding
_FEW = 256  # tokens: a mean over fewer says little
_PROMPT = 16  # tokens that the speed measurement goes on from


@dataclass(frozen=True)
class BitTarget:
    """What decides the bits: the same for all, a recipe by name, or a search that ends at a size in bytes, at bits
    per weight, or at a KL divergence in nats per token."""

    format: Format
    recipe: str | None = None
    max_size: int | None = None
    target_bpw: float | None = None
    max_kl: float | None = None

    @property
    def searches(self) -> bool:
        return (self.max_size, self.target_bpw, self.max_kl) != (None, None, None)

    def check(self) -> None:
        """Raises ConfigError for goals that exclude each other, and for impossible numbers."""
        given = [n for n in ("recipe", "max_size", "target_bpw", "max_kl") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both decide the bits", "one of them")
        if given and not self.format.affine:
            raise ConfigError(f"{given[0]} needs bits to choose from, {self.format.mode} has none", "the affine mode")
        for name in ("max_size", "target_bpw", "max_kl"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value!r}, it must be a positive number")


@dataclass(frozen=True)
class QuantizedTensors:
    tensors: LazyTensors
    errors: dict[str, float]  # filled while the tensors are read, where there is no calibration


class QuantizationJob:
    """One quantization: what it needs from the source, and its parts in their order."""

    def __init__(
        self, checkpoint: Checkpoint, goal: BitTarget, method: str, evaluate: bool, verify: bool, on_progress: Progress
    ):
        self._begun = time.monotonic()
        self.verifies = verify
        self._sums: dict[str, int] = {}
        self.source, self.goal, self.method, self.evaluates, self.on_progress = (
            checkpoint,
            goal,
            method,
            evaluate,
            on_progress,
        )
        self.config = checkpoint.config
        self.parameters = sum(math.prod(t.shape) for t in checkpoint.tensors.values())
        self.plan = self._plan()
        check_method(method, self.plan)
        if not any(self.plan.formats.values()):
            widths = ", ".join(map(str, sorted(set(self.plan.skipped.values()))))
            groups = ", ".join(map(str, GROUP_SIZES)) if goal.format.affine else goal.format.group_size
            raise CheckpointError(f"no matrix can be quantized: their widths are {widths}, groups are of {groups}")
        self.dtype = output_dtype(checkpoint.tensors)
        self.cast_to_16bit = replace(checkpoint, tensors=cast_to_16bit(checkpoint.tensors, self.dtype))
        self.calibration_text: text.CalibrationText | None = None
        self.eval_text: text.EvalText | None = None
        self.calibrates = method != "rtn" or goal.searches

    def _plan(self) -> QuantizationPlan:
        if self.goal.recipe is not None:
            return recipe(self.config, self.source.tensors, self.goal.recipe, self.goal.format.group_size)
        return uniform(self.config, self.source.tensors, self.goal.format)

    def read_texts(self, calibration_text: Path | str | None, eval_text: Path | str | None) -> None:
        """Raises ConfigError for a text that nothing would read."""
        needed = self.evaluates or self.goal.max_kl is not None
        if calibration_text is not None and not self.calibrates:
            raise ConfigError(
                "a calibration text has no effect on plain rounding", "method gptq, or an evaluation text"
            )
        if eval_text is not None and not needed:
            raise ConfigError("an evaluation text has no effect without measuring", "leaving it out")
        if not (self.calibrates or needed):
            return
        root = locate(self.source.path).root if self.source.path.is_dir() else None
        try:
            tokenizer = self.source.load_tokenizer()
        except TokenizerError as error:
            hint = f"{error.hint}; plain rounding without measuring (--no-evaluate) needs none"
            raise TokenizerError(error.message, hint) from error
        if self.calibrates:
            self.calibration_text = text.calibration_text(
                root, tokenizer, calibration_text, not needed or eval_text is not None
            )
        if needed:
            self.eval_text = text.eval_text(root, tokenizer, eval_text, calibration_text)

    def make(self, scratch: Path) -> tuple[QuantizationPlan, QuantizedTensors]:
        """The plan, searched for where that is asked, and its tensors."""
        if not self.goal.searches:
            return self.plan, self._quantized(self.plan, scratch)
        windows = self._windows()
        total = sum(chosen is not None for chosen in map(self.plan.format_of, self.plan.matrices))
        told = _counter(self.on_progress, "measuring each matrix", total)
        found = bit_search.sensitivities(self.cast_to_16bit, self.plan, windows, told)
        if self.goal.max_kl is None:
            plan = self._fit_to_size(found)
            return plan, self._quantized(plan, scratch)
        best: tuple[QuantizedTensors, Path] | None = None
        count = 0

        def kl_divergence(plan: QuantizationPlan) -> float:
            """Of one candidate; its files stay only if it is the smallest so far that is close enough."""
            nonlocal best, count
            count += 1
            folder = Path(tempfile.mkdtemp(dir=scratch))
            made = self._quantized(plan, folder, f", candidate {count}")
            kl = self._compared(self._checkpoint(plan, made.tensors), f", candidate {count}").kl
            if kl <= self.goal.max_kl:
                best, folder = (made, folder), best and best[1]
            if folder is not None:
                shutil.rmtree(folder)
            return kl

        plan = bit_search.fit_to_kl(self.plan, found, self.goal.max_kl, kl_divergence)
        return plan, best[0]

    def _fit_to_size(self, found: bit_search.Sensitivities) -> QuantizationPlan:
        """The plan that a search for a size ends at. Raises ConfigError naming the smallest size possible."""
        matrices = {f"{module}.weight" for m in self.plan.matrices for module in m.modules}
        others = sum(t.nbytes for name, t in self.cast_to_16bit.tensors.items() if name not in matrices)
        smallest = bit_search.steps(self.plan, found)[0]
        if self.goal.target_bpw is not None:
            limit = math.floor(self.goal.target_bpw * self.parameters / 8) - others
            if limit < smallest.nbytes():
                least = math.ceil(800 * (smallest.nbytes() + others) / self.parameters) / 100
                raise ConfigError(
                    f"{self.goal.target_bpw:g} bits per weight can't be reached",
                    f"{least} or more, or larger groups",
                )
            return bit_search.fit_to_size(self.plan, found, limit)
        tokenizer = self._tokenizer_bytes()
        plan, rest = smallest, others + tokenizer + self._beside(smallest)
        if self.goal.max_size < plan.nbytes() + rest:
            least = plan.nbytes() + rest
            raise ConfigError(f"{self.goal.max_size} bytes can't be reached", f"{least} or more, or larger groups")
        for _ in range(3):  # what lies beside the tensors depends on the plan, a little
            larger = bit_search.fit_to_size(self.plan, found, max(plan.nbytes(), self.goal.max_size - rest))
            rest = others + tokenizer + self._beside(larger)
            if larger.nbytes() + rest <= self.goal.max_size:
                return larger
        return plan

    def _beside(self, plan: QuantizationPlan) -> int:
        """An upper bound of what the folder has beside the values of tensors and the tokenizer."""
        config = self.config.with_changes(quantization=plan.quantization_config())
        stored = to_file_weights(weight_mappings(config, for_mlx=True), quantized(self.cast_to_16bit.tensors, plan))
        largest = sum(tensor.nbytes for tensor in stored.values())
        header = sum(
            len(json.dumps({name: {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [largest, largest]}}))
            for name, tensor in stored.items()
        )
        index = sum(len(name) + 60 for name in stored) if largest > huggingface.SHARD_BYTES else 0
        values = json.dumps({**self.source.hf_config, **config_to_hf(config)}, indent=2, default=str)
        return header + index + len(values.encode("utf-8")) + _MARGIN

    def _tokenizer_bytes(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            copy_tokenizer(self.source, Path(folder))
            return sum(file.stat().st_size for file in Path(folder).iterdir())

    def _windows(self) -> np.ndarray:
        length = min(text.WINDOW, self.config.max_position_embeddings)
        return self.calibration_text.windows(length, text.CALIBRATION)

    def _quantized(self, plan: QuantizationPlan, scratch: Path, which: str = "") -> QuantizedTensors:
        if self.method == "rtn":
            errors: dict[str, float] = {}

            def on_matrix(module: str, weight: mx.array, packed: PackedMatrix, chosen: Format) -> None:
                errors[module] = relative_error(weight, packed, chosen)

            return QuantizedTensors(quantized(self.cast_to_16bit.tensors, plan, on_matrix), errors)
        layers, tied = self.config.num_hidden_layers, self.config.tie_word_embeddings
        twice = tied and plan.formats[EMBEDDING] is not None
        own_head = plan.formats.get(HEAD) is not None
        told = _counter(self.on_progress, f"calibrating ({self.method}){which}", layers * (1 + twice) + own_head)
        result = quantize_calibrated(self.cast_to_16bit, plan, self.method, self._windows(), scratch, told)
        return QuantizedTensors(result.tensors, result.errors)

    def _checkpoint(self, plan: QuantizationPlan, tensors: LazyTensors) -> Checkpoint:
        return replace(
            self.source, config=self.config.with_changes(quantization=plan.quantization_config()), tensors=tensors
        )

    def _compared(self, result: Checkpoint, which: str = "") -> Comparison:
        def told(done: int, total: int) -> None:
            self.on_progress(f"comparing with the source{which}", done, total)

        documents, size = self.eval_text.documents, self.eval_text.bytes
        said = compare(self.source, result, documents, text_bytes=size, progress=told)
        if not math.isfinite(said.kl):
            raise CheckpointError("the KL divergence of the result from its source is not finite", "more bits")
        return said

    def write(self, folder: Path, plan: QuantizationPlan, made: QuantizedTensors) -> list[str]:
        """The files of the model; returns warnings. Checksums of what was computed stay for `report`."""
        config = self.config.with_changes(quantization=plan.quantization_config())
        tensors = with_read_progress(made.tensors, partial(self.on_progress, "writing"))
        if self.verifies:
            tensors = {name: self._summed(name, tensor) for name, tensor in tensors.items()}
        huggingface.write(folder, self.source.hf_config, config, tensors, None)
        return copy_tokenizer(self.source, folder)

    def _summed(self, name: str, tensor: LazyTensor) -> LazyTensor:
        def note(value: mx.array) -> mx.array:
            self._sums[name] = checksum(value)
            return value

        return tensor.transform(note)

    def report(
        self, source: str, out: Path, folder: Path, plan: QuantizationPlan, made: QuantizedTensors, warnings: list[str]
    ) -> QuantizationReport:
        """Read back what was written, check and measure it."""
        again = open_checkpoint(folder)
        done = checks(self.source, again, str(out), self._sums, self.on_progress) if self.verifies else []
        metrics = self._metrics(again) if self.evaluates else None
        warnings = [*self._warnings(), *warnings]
        files = [file for file in folder.iterdir() if file.is_file()]
        before, after = (sum(t.nbytes for t in c.tensors.values()) for c in (self.source, again))
        return QuantizationReport(
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
            reduced_group_sizes=dict(plan.reduced_group_sizes),
            skipped=dict(plan.skipped),
            bits={module: chosen.bits for module, chosen in plan.formats.items() if chosen is not None},
            errors=made.errors,
            error_of="weights" if self.method == "rtn" else "outputs",
            calibration_text=self.calibration_text.name if self.calibration_text else None,
            metrics=metrics,
            seconds=time.monotonic() - self._begun,
            checks=done,
            warnings=warnings,
        )

    def _warnings(self) -> list[str]:
        found = []
        sizes: dict[str, int] = {}
        for tensor in self.source.tensors.values():
            sizes[tensor.stored_dtype] = sizes.get(tensor.stored_dtype, 0) + tensor.nbytes
        packed = sorted(kind for kind in sizes if kind not in UNQUANTIZED_DTYPES)
        if packed:
            kinds = " and ".join(packed)
            found.append(f"the source is quantized already ({kinds}): what is shown comes on top of what that has cost")
        count = _FEW if self.eval_text is None else self.eval_text.predicted
        if count < _FEW:
            found.append(f"measured on {count} tokens of {self.eval_text.name}: fewer than {_FEW} say little")
        return found

    def _metrics(self, again: Checkpoint) -> QuantizationMetrics:
        said = self._compared(again)
        self.on_progress("measuring speed", 0, 1)
        before, after, note = decode_speeds(self.source, again, self.eval_text.documents[0][:_PROMPT])
        self.on_progress("measuring speed", 1, 1)
        return QuantizationMetrics(
            text=self.eval_text.name,
            tokens=said.tokens,
            context_length=said.context_length,
            stride=said.stride,
            kl=said.kl,
            top1_agreement=said.top1_agreement,
            bits_per_byte_before=said.bits_per_byte_a,
            bits_per_byte_after=said.bits_per_byte_b,
            hidden_state_errors=said.layers,
            speed_before=before,
            speed_after=after,
            speed_note=note,
        )


def _counter(on_progress: Progress, phase: str, total: int) -> Callable[[str], None]:
    """Told one thing that is done at a time."""
    done = 0

    def advance(_name: str) -> None:
        nonlocal done
        done += 1
        on_progress(phase, done, total)

    return advance
