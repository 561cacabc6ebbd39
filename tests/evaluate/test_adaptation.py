"""Test-time training against an optimizer in float64 numpy, whose gradients are central differences."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_map, tree_unflatten
from mlxlm.evaluate.adaptation import AdaptiveScorer
from mlxlm.evaluate.loss import evaluate_text, windows
from mlxlm.utils.errors import ConfigError
from tests.evaluate.test_text import TEXT, read
from tests.run_command import run_command

RATE = 3e-3


def copy_of(lm):
    model = type(lm.model)(lm.config)
    model.update(tree_map(mx.array, lm.model.parameters()))
    return model


def nats(model, window, new):
    logits = model(mx.array([window[:-1]]))[0].astype(mx.float32)
    losses = mx.logsumexp(logits, -1) - mx.take_along_axis(logits, mx.array(window[1:])[:, None], -1)[:, 0]
    return losses[-new:].sum()


def test_the_second_window_is_predicted_after_one_step_of_adam(lm):
    ids = lm.tokenizer.encode(TEXT)[:49]
    first, second = windows([ids], 32, 16)
    scorer, expected = AdaptiveScorer(lm, 32, RATE), copy_of(lm)
    scorer.add(*first)
    assert scorer.nats == pytest.approx(nats(expected, *first).item(), rel=1e-5)
    gradients = nn.value_and_grad(expected, lambda model: nats(model, *first) / first[1])(expected)[1]
    updated = []
    for (name, weight), (_, gradient) in zip(tree_flatten(expected.parameters()), tree_flatten(gradients), strict=True):
        gradient = np.array(gradient, np.float64)  # the first step of Adam with bias correction: its sign
        updated.append((name, mx.array(np.array(weight) - RATE * gradient / (np.abs(gradient) + 1e-8), mx.float32)))
    expected.update(tree_unflatten(updated))
    before = scorer.nats
    scorer.add(*second)
    assert scorer.nats - before == pytest.approx(nats(expected, *second).item(), rel=1e-4)
    assert scorer.nats - before != pytest.approx(nats(lm.model, *second).item(), rel=1e-3)
    assert scorer.tokens == 48


def test_later_text_changes_no_earlier_prediction(lm):
    ids, totals = lm.tokenizer.encode(TEXT)[:65], []
    for end in (ids[33:], ids[:32]):
        scorer, sums = AdaptiveScorer(lm, 32, RATE), []
        for window, new in windows([ids[:33] + end], 32, 16):
            scorer.add(window, new)
            sums.append(scorer.nats)
        totals.append(sums)
    assert totals[0][0] == totals[1][0] and totals[0][1] != totals[1][1]


def test_adapting_lowers_the_loss_of_a_repeated_text_and_keeps_the_model(lm):
    before = {name: np.array(weight) for name, weight in tree_flatten(lm.model.parameters())}
    plain = evaluate_text(lm, read(TEXT), context_length=32)
    still = evaluate_text(lm, read(TEXT), context_length=32, adapt_learning_rate=0.0)
    adapted = evaluate_text(lm, read(TEXT), context_length=32, adapt_learning_rate=RATE)
    assert still.nats == pytest.approx(plain.nats, rel=1e-5)
    assert adapted.nats < 0.9 * plain.nats and adapted.tokens == plain.tokens and adapted.bytes == plain.bytes
    for name, weight in tree_flatten(lm.model.parameters()):
        assert np.array_equal(np.array(weight), before[name])


def test_quantized_weights_are_refused(lm):

    model = copy_of(lm)
    nn.quantize(model, group_size=32, bits=8)
    with pytest.raises(ConfigError, match="is quantized"):
        AdaptiveScorer(replace(lm, model=model), 32)


def test_the_command_shows_both(folder, tmp_path):

    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT)
    paths = tmp_path / "a.txt", tmp_path / "b.txt"
    options = "--context-length", 32, "--adapt", "--adapt-learning-rate", RATE
    found = json.loads(run_command("evaluate", folder, *paths, *options, "--json").stdout)
    assert found["adapted"]["tokens"] == found["tokens"]
    assert math.log(2) * found["adapted"]["bits_per_byte"] * found["bytes"] < 0.9 * found["nats"]
    lines = run_command("evaluate", folder, *paths, *options).stdout.decode().splitlines()
    assert [line.split("  ")[0].rsplit("/")[-1] for line in lines[1:7]] == [
        "a.txt", "b.txt", "all", "a.txt, adapted", "b.txt, adapted", "all, adapted",
    ]  # fmt: skip
    failed = run_command("evaluate", folder, "-", "--adapt", stdin=TEXT.encode())
    assert failed.returncode == 1 and b"can be read only once" in failed.stderr
