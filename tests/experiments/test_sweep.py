"""Sweeps: combinations, rounds, time limit, the noise of seeds, and `mlxlm sweep`."""

import json
import math
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.cli.main import _run
from mlxlm.config import ModelConfig
from mlxlm.experiments.sweep import FINALISTS, Halving, Result, Sweep, Trial
from mlxlm.experiments.sweep_report import _student_t, rank, seed_noise, table_row
from mlxlm.experiments.variant import Variation, vary
from mlxlm.utils.errors import ConfigError

CONFIG = ModelConfig(32, 1, 2, 48, 300)


@given(st.integers(0, 99), st.floats(0, 10), st.floats(0.01, 10), st.booleans())
def test_draws_are_inside_the_range(seed, low, width, whole):
    low, high = (math.floor(low), math.floor(low) + math.ceil(width) + 1) if whole else (low, low + width)
    variation = Variation.parse(f"x={low}..{high}")
    drawn = [variation.draw(np.random.default_rng([seed, i])) for i in range(50)]
    assert all(low * 0.995 <= float(value) <= high * 1.005 for value in drawn) and len(set(drawn)) > 1
    if whole:
        assert all(value.isdigit() for value in drawn)


def test_draws_of_a_range_are_log_uniform():
    rng, variation = np.random.default_rng(0), Variation.parse("learning-rate=1e-4..1e-2")
    drawn = np.array([float(variation.draw(rng)) for _ in range(400)])
    assert variation.name == "learning_rate" and abs((drawn < 1e-3).mean() - 0.5) < 0.08


def test_combinations():
    both = [Variation.parse(text) for text in ("learning_rate=1e-3,1e-2", 'rope_scaling=yarn:4,{"a": [1, 2], "b": 1}')]
    grid = vary(both)
    assert [v.settings["learning_rate"] for v in grid] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert grid[1].parts == {"rope_scaling": '{"a": [1, 2], "b": 1}'}
    assert {v.name for v in vary(both, samples=4)} == {v.name for v in grid}
    ranges = [Variation.parse("learning_rate=1e-4..1e-2"), Variation.parse("dropout=0..0.3")]
    drawn = vary(ranges, samples=20)
    assert len({v.name for v in drawn}) == 20 and drawn == vary(ranges, samples=20) != vary(ranges, samples=20, seed=1)


@pytest.mark.parametrize(
    ("texts", "samples", "message"),
    [
        (["learning_rate"], None, "'learning_rate' varies nothing .try: learning_rate=1e-3,3e-3"),
        (["dropout=0,,1"], None, "varies nothing"),
        (["dropout=a..b"], None, "is no range of numbers from 0 up"),
        (["dropout=0.3..0.1"], None, "is no range of numbers from 0 up"),
        (["dropout=nan..1"], 2, "is no range"),
        (["dropout=0..0.5"], None, "dropout is a range, .* .try: `samples=16`"),
        (["dropout=0,0.1", "dropout=0.2"], None, "dropout is set to both 0 and 0.2"),
        (["dropout=0,0.1"], 3, "fewer than 3 combinations to draw .try: `samples=2`"),
        (["steps=5,6"], None, "steps can't differ between variants .try: one budget"),
        (["dropout=0,x"], None, "dropout is 'x' .try: a number"),
        (["learnin_rate=1e-3,1"], None, "unknown override 'learnin_rate' .try: learning_rate"),
    ],
)
def test_impossible_variations_are_rejected(texts, samples, message):
    with pytest.raises(ConfigError, match=message):
        for variant in vary([Variation.parse(text) for text in texts], samples):
            variant.apply_to(CONFIG)


def a_result(trial, score, **changes):
    values = {field.name: 1 for field in fields(Result)} | {
        "name": trial.variant.name,
        "values": trial.variant.settings,
    }
    values |= {"round": trial.round, "seed": trial.repeat, "bits_per_byte": score, "finished": score is not None}
    return Result(**values | changes)


@dataclass(frozen=True)
class FakeSweep(Sweep):
    """Runs are finished as soon as they are opened."""

    done: dict = field(default_factory=dict, init=False)

    def run(self, score, seconds=lambda trial: 1.0):
        for trial in self.trials():
            key = trial.round, self.folder(trial)
            assert key not in self.done
            tokens = self.round_tokens[trial.round] if self.round_tokens else 1
            self.done[key] = trial, a_result(trial, score(trial), tokens=tokens, elapsed=seconds(trial))
        return [trial for trial, _ in self.done.values()]

    def _has_run(self, trial):
        return (trial.round, self.folder(trial)) in self.done

    def result(self, trial):
        return self.done[trial.round, self.folder(trial)][1]


def fake_sweep(count, reduction_factor=3, seeds=3):
    variants = vary([Variation.parse("seed=" + ",".join(map(str, range(0, 100 * count, 100))))])
    halving = Halving(reduction_factor, seeds)
    return FakeSweep(Path("s"), {"steps": 90}, Path("d"), CONFIG, tuple(variants), halving, None, (), [])


@settings(max_examples=50)
@given(st.integers(2, 60), st.integers(1, 5), st.integers(1, 4), st.randoms())
def test_each_round_has_the_best_of_the_one_before(count, factor, seeds, random):
    sweep = fake_sweep(count, factor, seeds)
    scores = {v.name: random.choice([random.random(), None]) if count > 5 else random.random() for v in sweep.variants}
    trials = sweep.run(lambda trial: scores[trial.variant.name])
    survivors = [s for s in scores.values() if s is not None]
    if len(survivors) == count:
        assert len(trials) == sweep.num_trials
    for number, size in enumerate(sweep.counts):
        own = [t for t in trials if t.round == number and not t.repeat]
        fraction = factor ** (number - len(sweep.counts) + 1)
        assert {sweep.steps(t.variant, number) for t in own} <= {max(1, round(90 * fraction))}
        if number:
            assert size == max(FINALISTS, math.ceil(sweep.counts[number - 1] / factor))
            assert [scores[t.variant.name] for t in own] == sorted(survivors)[:size]
    repeats = [scores[t.variant.name] for t in trials if t.repeat]
    assert repeats == sorted(survivors)[:FINALISTS] * (seeds - 1)
    ranks = rank(sweep.results())
    assert len(ranks) == count and all(map(table_row, ranks))
    assert [runs[0].bits_per_byte for runs in ranks][: len(sorted(survivors)[:FINALISTS])] == sorted(survivors)[
        :FINALISTS
    ]


@pytest.mark.parametrize("slowness", [0.5, 1.0, 3.0])
def test_a_sweep_takes_its_time(slowness, tmp_path):
    """Also on a machine that becomes slower or faster after the benchmark."""
    costs = tuple((3.0, 1e-3 * (1 + i)) for i in range(27))
    sweep = replace(fake_sweep(27), path=tmp_path, settings={}, seconds=6000.0, costs=costs)
    sweep.round_tokens.append(sweep._tokens_left(0, sweep.variants))
    (tmp_path / "sweep.json").write_text("{}")
    by_name, spent = dict(zip((v.name for v in sweep.variants), costs, strict=True)), []

    def seconds(trial):
        fixed, token = by_name[trial.variant.name]
        spent.append(slowness * (fixed + token * sweep.round_tokens[trial.round]))
        return spent[-1] - 2.0

    sweep.run(lambda trial: trial.variant.settings["seed"], seconds)
    assert json.loads((tmp_path / "sweep.json").read_text())["round_tokens"] == sweep.round_tokens
    assert len(sweep.round_tokens) == 3 and sweep.round_tokens == sorted(sweep.round_tokens)
    assert sum(spent) == pytest.approx(6000, rel=0.25)


def test_noise_of_seeds():
    table_of_t = {2: 4.303, 3: 3.182, 4: 2.776, 6: 2.447, 10: 2.228, 30: 2.042}
    assert all(_student_t(n) == pytest.approx(t, rel=0.035) for n, t in table_of_t.items())

    def ranks(*scores):
        trials = map(Trial, fake_sweep(len(scores)).variants)
        runs = [[a_result(trial, x) for x in own] for trial, own in zip(trials, scores, strict=True)]
        return [tuple(own) for own in runs]

    noise = seed_noise(ranks([2.0, 2.02, 1.98], [2.2, 2.22, 2.18], [2.3, 2.32, 2.28]))
    assert (noise.deviation, noise.difference) == (pytest.approx(0.02), pytest.approx(0.2))
    assert noise.margin == pytest.approx(2.447 * 0.02 * math.sqrt(2 / 3), rel=0.01)
    assert re.match(r"seed=0 is better than seed=100: 0\.2000 ± 0\.0399 ", str(noise))
    same = seed_noise(ranks([2.0, 2.1], [2.01, 2.12], [3.0]))
    assert "seed=0 and seed=100 can't be told apart: 0.0150 ± " in str(same)
    assert seed_noise(ranks([2.0, 2.1], [2.2], [2.3])) is None
    # Of equal variants, one in twenty differs by more than the margin.
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        pair = seed_noise(ranks(*rng.normal(size=(2, 3)).tolist()))
        wrong += abs(pair.difference) > pair.margin
    assert 0.02 < wrong / 400 < 0.09


COMMAND = [
    "--preset", "0.3m", "--set", "hidden_size=32", "--set", "num_attention_heads=2", "--set", "num_hidden_layers=1",
    "--vocab-size", "300", "--batch-size", "2", "--max-seq-length", "16", "--eval-tokens", "200",
]  # fmt: skip


def test_command(tmp_path, text_file, capsys, monkeypatch):
    """A sweep that is stopped in each run and resumed, with a variant that diverges."""
    monkeypatch.setattr("mlxlm.train.run.write_report", lambda runs, path, defaults: path.write_text(""))
    out = tmp_path / "my sweep"
    vary_rate = ["--vary", "learning_rate=1e-3,1e-2,1e9", "--vary", "dropout=0,0.1", "--grad-clip", "0"]
    command = ["sweep", str(text_file), "--out", str(out), *COMMAND, "--steps", "9", "--seeds", "2"]
    assert _run([*command, *vary_rate]) == 0
    stdout, stderr = capsys.readouterr()
    lines = stdout.splitlines()
    assert lines[0].split()[:4] == ["variant", "round", "parameters", "tokens"]
    assert len(lines) == 1 + 6 + 1 and lines[-1] == str(out / "sweep.html")
    assert sum("diverged" in line for line in lines[1:7]) == 2 and "round 1 of 2 (1 of 12)" in stderr
    page = (out / "sweep.html").read_text()
    assert page.count("<tr>") == 7 and "round-2/learning_rate%3D1e-2-dropout%3D0/report.html" in page
    assert (out / "sweep.png").stat().st_size > 10_000
    assert _run(["sweep", "--resume", str(out), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    finished = [run for run in values["runs"] if run["finished"]]
    assert [run["round"] for run in finished] == [0] * 4 + [1] * 6 and [run["steps"] for run in finished] == [3] * 4 + [
        9
    ] * 6
    assert {run["seed"] for run in finished[-3:]} == {1} and "the seed alone changes a result by" in "".join(
        values["notes"]
    )
    for arguments, code, message in (
        (command, 2, "nothing varies (try: --vary learning_rate=1e-3,3e-3)"),
        ([*command, "--vary", "preset=0.3m,1m"], 2, "--set would have no effect: preset varies"),
        ([*command, "--vary", "dropout=0..1"], 1, "(try: --samples 16, or a list"),
        (
            ["sweep", "--resume", str(tmp_path)],
            1,
            "is not a sweep: it has no sweep.json (try: the --out of mlxlm sweep)",
        ),
    ):
        assert _run(arguments) == code and message in capsys.readouterr().err
