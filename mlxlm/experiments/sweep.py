"""Sweeps: variants of a model and its training, trained on the same text; the best of them longer and with more seeds.

Successive halving (Jamieson & Talwalkar 2016): the first round trains all variants on a fraction of the tokens, each
later one the best of them on `reduction_factor` times as many. A round starts from scratch, with complete learning rate
schedules: in the middle of a schedule low rates look better than they are in the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from mlxlm.checkpoint.locations import is_run_folder, read_checkpoint_state
from mlxlm.config import ModelConfig
from mlxlm.data import DataOptions, Manifest
from mlxlm.experiments.run_group import RunGroup, is_finished, prepare_shared_data
from mlxlm.experiments.variant import SETTINGS, Variant, check_names, variant_errors
from mlxlm.families import config_from_hf, config_to_hf
from mlxlm.report import log_entries, read_run
from mlxlm.train.budget import Budget, check_duration, fit_token_seconds, num_rows
from mlxlm.train.run import Run
from mlxlm.train.settings import TokenizerOptions, TrainSettings
from mlxlm.train.start import (
    Phase,
    as_data_options,
    as_tokenizer_options,
    check_trainable,
    no_phase,
    set_default_dtype,
    steps_for,
    with_tokenizer,
)
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import read_json, write_json

FINALISTS = 3  # variants of the last round, which are repeated with other seeds
_TARGET_STEPS, _MIN_STEPS = 400, 20  # of a run of the first round, by a time limit
_RUN_SECONDS = 2.0  # of a run besides steps and validation: loading, saving, plots


@dataclass(frozen=True)
class Halving:
    """How a sweep divides its budget.

    Attributes:
        reduction_factor: A round has this many times fewer runs than the one before, and as many times longer ones; 1:
            all variants are trained to the end.
        seeds: Number of seeds of the best variants, which tell differences from chance.
    """

    reduction_factor: int = 3
    seeds: int = 3


@dataclass(frozen=True)
class Trial:
    """A run of a sweep.

    Attributes:
        variant: What it trains.
        round: Its round, from 0.
        repeat: Which of the seeds it has; 0 is the variant's own.
    """

    variant: Variant
    round: int = 0
    repeat: int = 0


@dataclass(frozen=True)
class Result:
    """The state of a run.

    Attributes:
        name: The variant.
        values: What the variant changes.
        round: The run's round, from 0.
        seed: Its seed.
        path: Its folder.
        parameters: Number of parameters.
        learning_rate: Peak learning rate.
        step: Last step.
        steps: Steps of the whole run.
        tokens: Tokens trained on so far.
        elapsed: Time of the run up to its last checkpoint, without pauses.
        tokens_per_second: The median over the steps.
        memory: MLX's peak memory in bytes; None if the run is unfinished.
        bits_per_byte: Bits per byte of the best validation; None before the first one.
        state: "finished", "failed" (diverged), "stopped" or "not finished".
        finished: Whether the last step is saved.
    """

    name: str
    values: dict[str, Any]
    round: int
    seed: int
    path: str
    parameters: int
    learning_rate: float
    step: int
    steps: int
    tokens: int
    elapsed: float
    tokens_per_second: float
    memory: int | None
    bits_per_byte: float | None
    state: str
    finished: bool


@dataclass(frozen=True)
class Sweep(RunGroup):
    """A folder of runs, one or more for each variant of a model.

    To train what is unfinished: `for trial in sweep.trials(): train(sweep.open_run(trial), ...)`.

    Attributes:
        config: The base model.
        variants: The variants.
        halving: How the budget is divided.
        seconds: Time limit of all runs; None: the length of the runs is given.
        costs: With a time limit, for each variant by the benchmark: seconds of a run without its tokens, and per token.
        round_tokens: Tokens of a run of each round that has begun. Without a time limit, of all rounds; [] if the
            settings have the steps of the last round.
        seconds_before: Time that was spent when the last round began.
        opened: When this object was made, as of `time.monotonic()`.
    """

    config: ModelConfig
    variants: tuple[Variant, ...]
    halving: Halving
    seconds: float | None
    costs: tuple[tuple[float, float], ...]
    round_tokens: list[float]
    seconds_before: float = 0.0
    opened: float = field(default_factory=time.monotonic, compare=False)

    KIND: ClassVar[str] = "sweep"
    FILE: ClassVar[str] = "sweep.json"
    COMMAND: ClassVar[str] = "mlxlm sweep"
    PLOT_FILE: ClassVar[str] = "sweep.png"

    @classmethod
    def start(
        cls,
        out: Path | str,
        data: DataOptions | Sequence[str | Path],
        config: ModelConfig,
        variants: Sequence[Variant],
        *,
        tokenizer: TokenizerOptions | str | Path | None = None,
        budget: Budget | None = None,
        settings: Mapping[str, Any] | None = None,
        halving: Halving | None = None,
        phase: Phase = no_phase,
    ) -> Self:
        """Make the folder `out` for a sweep.

        All variants see the same tokens in the same order, unless a variant has its own `seed` or other batches. For
        `data`, `tokenizer`, `phase` and errors, see `start_run`.

        Args:
            out: The folder.
            data: The text.
            config: The base model.
            variants: Two or more variants of it.
            tokenizer: The tokenizer of all runs.
            budget: `tokens` of a run of the last round, or `minutes` for all runs, with their `duty_cycle`; unless
                `settings` have "steps". Default: the compute-optimal tokens of the first variant. With minutes, the
                batch size is fitted to them if nothing sets it.
            settings: Fields of `TrainSettings` of all runs.
            halving: How the budget is divided. Default: all variants are trained to the end, with one seed.
            phase: Shows the preparation.

        Raises:
            ConfigError: There are fewer than two variants, one can't be trained, or the time is too short.
        """
        out, data, tokenizer = Path(out), as_data_options(data), as_tokenizer_options(tokenizer)
        budget, settings, halving = budget or Budget(), dict(settings or {}), halving or Halving(1, 1)
        check_names(variants)
        shared = TrainSettings.provisional(settings)
        config = config.with_changes(max_position_embeddings=shared.max_seq_length)
        configs = [variant.apply_to(config) for variant in variants]
        check_duration(minutes=budget.minutes, tokens=budget.tokens, steps=settings.get("steps"))
        variant_settings(variants, configs, settings)
        with atomic_new_folder(out) as folder:
            vocab_size, seed = config.vocab_size, shared.seed
            loaded, shards = prepare_shared_data(folder, data, tokenizer, vocab_size, seed=seed, phase=phase)
            configs = [with_tokenizer(variant_config, loaded) for variant_config in configs]
            draft = cls(folder, settings, shards, config, tuple(variants), halving, None, (), [])
            if budget.minutes:
                draft = draft._with_time_limit(budget, configs, phase)
            elif settings.get("steps") is None:
                step = variant_settings(variants, configs, settings)[0]
                tokens = float(steps_for(budget.tokens, configs[0], step) * step.tokens_per_step)
                rounds = range(len(draft.counts))
                draft = replace(draft, round_tokens=[tokens * draft._fraction(number) for number in rounds])
            for variant in variants:  # check all before the first is trained
                with variant_errors(variant.name):
                    TrainSettings.provisional({**draft.settings, **variant.settings, "steps": draft.steps(variant, 0)})
            fields = {name: getattr(draft, name) for name in ("settings", "seconds", "costs", "round_tokens")}
            changes = {"config": config_to_hf(config), "variants": [asdict(variant) for variant in variants]}
            cls.write(folder, shards, **changes, **fields, halving=asdict(halving))
        return cls.open(out)

    @classmethod
    def parse_fields(cls, values: Mapping[str, Any], file: Path) -> dict[str, Any]:
        """Return the fields that a sweep adds. See `RunGroup.parse_fields`."""
        variants = tuple(Variant(**variant) for variant in values["variants"])
        texts = [text for v in variants for text in (v.name, *v.parts, *v.parts.values())]
        settings = [values["settings"], *(variant.settings for variant in variants)]
        if not all(isinstance(text, str) for text in texts) or any(s.keys() - SETTINGS for s in settings):
            raise ValueError
        config = config_from_hf(values["config"], str(file))
        check_names(variants)
        seconds, round_tokens = values.get("seconds"), [float(tokens) for tokens in values.get("round_tokens", ())]
        costs = tuple((float(fixed), float(token)) for fixed, token in values.get("costs", ()))
        halving = Halving(**values.get("halving", vars(Halving(1, 1))))  # folders of earlier versions have none
        positive = all(0 < n < 1e18 for n in (*round_tokens, *sum(costs, ()), 1.0 if seconds is None else seconds))
        has_length = bool(round_tokens) or values["settings"]["steps"] > 0
        has_costs = len(costs) == len(variants) if seconds is not None else not costs
        is_whole = all(type(n) is int and 0 < n <= 100 for n in vars(halving).values())
        if not (positive and has_length and has_costs and is_whole):
            raise ValueError
        times = {"seconds": seconds, "costs": costs, "round_tokens": round_tokens}
        times["seconds_before"] = float(values.get("seconds_before", 0.0))
        return {"config": config, "variants": variants, "halving": halving, **times}

    @property
    def counts(self) -> list[int]:
        """The number of runs of each round, without repeats."""
        counts = [len(self.variants)]
        while self.halving.reduction_factor > 1 and counts[-1] > FINALISTS:
            counts.append(max(FINALISTS, -(-counts[-1] // self.halving.reduction_factor)))
        return counts

    @property
    def num_trials(self) -> int:
        """The number of all runs."""
        return sum(self.counts) + (self.halving.seeds - 1) * min(FINALISTS, len(self.variants))

    def trials(self) -> Iterator[Trial]:
        """Yield all runs in order. A round depends on the results of the one before, so train each run in between."""
        last, variants = len(self.counts) - 1, list(self.variants)
        for number, count in enumerate(self.counts):
            if number:
                variants = self._best(number - 1, count)
            if variants:
                self._begin_round(number, variants)
            yield from (Trial(variant, number) for variant in variants)
        for repeat in range(1, self.halving.seeds):
            yield from (Trial(variant, last, repeat) for variant in self._best(last, FINALISTS))

    def _best(self, number: int, count: int) -> list[Variant]:
        """Return the `count` best variants of a finished round, or fewer if others have failed."""
        results = [(self.result(Trial(v, number)), v) for v in self.variants if self._has_run(Trial(v, number))]
        finished = [(r.bits_per_byte, v) for r, v in results if r.finished and r.bits_per_byte is not None]
        return [variant for _, variant in sorted(finished, key=lambda pair: pair[0])[:count]]

    def open_run(self, trial: Trial, phase: Phase = no_phase) -> Run:
        """Open a run, or make it."""
        variant = trial.variant
        settings = {**variant.settings, "steps": self.steps(variant, trial.round)}
        if trial.repeat:
            settings["seed"] = self._seed(variant) + trial.repeat
        return self.open_or_start_run(self.folder(trial), self.config_of(variant), settings, phase)

    def folder(self, trial: Trial) -> str:
        """Return the folder of a run, relative to the sweep's."""
        if len(self.counts) == self.halving.seeds == 1:
            return trial.variant.folder
        part = f"seed-{self._seed(trial.variant) + trial.repeat}" if trial.repeat else f"round-{trial.round + 1}"
        return f"{part}/{trial.variant.folder}"

    def config_of(self, variant: Variant) -> ModelConfig:
        """Return the variant's model."""
        return variant.apply_to(self.config)

    def steps(self, variant: Variant, number: int) -> int:
        """Return the steps of a run of round `number`, which has begun."""
        if (steps := self.settings.get("steps")) is not None:
            return max(1, round(steps * self._fraction(number)))
        settings = TrainSettings.provisional({**self.settings, **variant.settings})
        return max(1, round(self.round_tokens[number] / settings.tokens_per_step))

    def results(self) -> list[Result]:
        """Return the state of each run that has started, by rounds, the repeats last."""
        last = len(self.counts) - 1
        trials = [Trial(variant, number) for number in range(last + 1) for variant in self.variants]
        trials += [Trial(variant, last, n) for n in range(1, self.halving.seeds) for variant in self.variants]
        return [self.result(trial) for trial in trials if self._has_run(trial)]

    def result(self, trial: Trial) -> Result:
        """Return the state of a run that has started."""
        run = Run.open(self.path / self.folder(trial))
        history, checkpoints = read_run(run.path), run.checkpoints()
        step, tokens = (column[-1] if (column := history.steps[name]) else 0.0 for name in ("step", "tokens"))
        speeds = sorted(speed for speed in history.steps["tokens_per_second"] if speed > 0)
        elapsed = log_entries.number(read_checkpoint_state(checkpoints[-1]).get("elapsed")) if checkpoints else 0.0
        best = history.best
        memory = [event.get("memory") for event in history.events if event["event"] == "finished"]
        return Result(
            name=trial.variant.name,
            values={**trial.variant.parts, **trial.variant.settings},
            round=trial.round,
            seed=run.settings.seed,
            path=str(run.path),
            parameters=run.config.parameter_count(),
            learning_rate=run.settings.learning_rate,
            step=int(step),
            steps=run.settings.steps,
            tokens=int(tokens),
            elapsed=elapsed,
            tokens_per_second=speeds[len(speeds) // 2] if speeds else 0.0,
            memory=memory[-1] if memory else None,
            bits_per_byte=best and best.bits_per_byte,
            state=history.state,
            finished=is_finished(run),
        )

    def _has_run(self, trial: Trial) -> bool:
        return is_run_folder(self.path / self.folder(trial))

    def _seed(self, variant: Variant) -> int:
        return TrainSettings.provisional({**self.settings, **variant.settings}).seed

    def _fraction(self, number: int) -> float:
        """Return the length of a run of a round, relative to the last round's."""
        return float(self.halving.reduction_factor) ** (number + 1 - len(self.counts))

    def _with_time_limit(self, budget: Budget, configs: Sequence[ModelConfig], phase: Phase) -> Self:
        """Return the sweep with a time limit, and the batch size and first round that follow from a benchmark."""
        seconds, values, validation_tokens = (
            budget.seconds_left(),
            dict(self.settings),
            Manifest.read(self.data).validation.tokens,
        )
        fits_batch = "batch_size" not in values and not any("batch_size" in v.settings for v in self.variants)
        if fits_batch:
            values["batch_size"] = 4
        drafts = variant_settings(self.variants, configs, values)
        with phase("benchmarking two model sizes", None):
            token_seconds = fit_token_seconds(configs, seconds, lambda config: drafts[configs.index(config)])
        validation = min(validation_tokens, drafts[0].eval_tokens) / 3  # of a training step, a third is forward
        per_token = [token_seconds(config) * 100 / budget.duty_cycle for config in configs]
        costs = tuple((_RUN_SECONDS + validation * seconds, seconds) for seconds in per_token)
        sweep = replace(self, seconds=seconds, costs=costs)
        tokens = sweep._tokens_left(0, self.variants)
        if fits_batch:
            row = drafts[0].max_seq_length * drafts[0].grad_accumulation_steps
            values["batch_size"] = num_rows(max(1.0, tokens) / _TARGET_STEPS, row)
        if tokens < (least := _MIN_STEPS * TrainSettings.provisional(values).tokens_per_step):
            more = sweep._seconds_for(0, self.variants, least) / 60
            problem = f"in the time, a run of the first round would see {max(0, int(tokens)):,} tokens, too few"
            raise ConfigError(problem, f"`minutes={math.ceil(1.2 * more)}`, or fewer variants")
        return replace(sweep, settings=values, round_tokens=[tokens])

    def _begin_round(self, number: int, variants: Sequence[Variant]) -> None:
        """With a time limit, fit the length of the round to the time that is left, and record it."""
        if self.seconds is None or number < len(self.round_tokens):
            return
        self.round_tokens.append(max(self.round_tokens[-1], self._tokens_left(number, variants)))
        file = self.path / self.FILE
        times = {"round_tokens": self.round_tokens, "seconds_before": self._seconds_spent()}
        write_json(file, {**read_json(file), **times})

    def _tokens_left(self, number: int, variants: Sequence[Variant]) -> float:
        """Return the tokens of a run of a round with which it and the later ones end in time."""
        assert self.seconds is not None
        spent, predicted = self._seconds_spent(), 0.0
        costs = dict(zip((v.name for v in self.variants), self.costs, strict=True))
        for result in self.results():
            fixed, token = costs[result.name]
            predicted += fixed + token * result.tokens
        seconds = (self.seconds - spent) * (
            predicted / spent if predicted else 1.0
        )  # as the benchmark would measure them
        fixed = self._seconds_for(number, variants, 0)
        return (seconds - fixed) / (self._seconds_for(number, variants, 1) - fixed)

    def _seconds_spent(self) -> float:
        """Return the time of the sweep so far: by the clock, or at least that of the runs."""
        runs = sum(result.elapsed + _RUN_SECONDS for result in self.results())
        return max(runs, self.seconds_before + time.monotonic() - self.opened)

    def _seconds_for(self, number: int, variants: Sequence[Variant], tokens: float) -> float:
        """Predict the time of a round, whose runs have `tokens`, and of the later ones."""
        costs = [cost for variant, cost in zip(self.variants, self.costs, strict=True) if variant in variants]
        fixed, token = (sum(column) / len(costs) for column in zip(*costs, strict=True))
        counts = [*self.counts[number:-1], self.counts[-1] + self.num_trials - sum(self.counts)]
        return sum(n * (fixed + token * tokens * self.halving.reduction_factor**i) for i, n in enumerate(counts))


class Comparison(Sweep):
    """The sweep of `mlxlm compare-architectures`: all variants are trained to the end, with one seed."""

    KIND: ClassVar[str] = "comparison"
    FILE: ClassVar[str] = "comparison.json"
    COMMAND: ClassVar[str] = "mlxlm compare-architectures"
    PLOT_FILE: ClassVar[str] = "comparison.png"


def variant_settings(
    variants: Sequence[Variant], configs: Sequence[ModelConfig], settings: Mapping[str, Any]
) -> list[TrainSettings]:
    """Return the provisional settings of each variant. Raises ConfigError for one that can't be trained here."""
    result = []
    for variant, config in zip(variants, configs, strict=True):
        values = {**settings, **variant.settings}
        with variant_errors(variant.name):
            set_default_dtype(values)
            result.append(TrainSettings.provisional(values))
            check_trainable(config, result[-1])
    return result
