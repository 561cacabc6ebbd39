"""The training step: loss weights, dtypes, activation recomputation, EMA weights."""

from typing import NamedTuple

import numpy as np
import pytest

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.data import Batch
from mlxlm.kernels import cross_entropy
from mlxlm.model import Decoder
from mlxlm.model.block import Dropout
from mlxlm.train import Started, TrainingWarning, TrainSettings
from mlxlm.train.step import TrainStep, cross_entropy_loss, update_ema
from tests.train.training_runs import contents, finish

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 300, (2, 17)).astype(np.int32)
SEGMENTS = np.repeat(np.array([[0] * 9 + [1] * 7]), 2, axis=0).astype(np.int32)
WEIGHTS = RNG.choice([0.0, 1.0, 2.0], (2, 16)).astype(np.float32)


def a_step(config, dropout=0.0, **settings) -> TrainStep:
    model = Decoder(config, dropout=dropout)
    model.init_weights(0)
    mx.random.seed(0)
    return TrainStep(model, TrainSettings(**{"steps": 50, "learning_rate": 1e-2, "grad_clip": 0, **settings}))


def gradients(step: TrainStep, *batch) -> dict[str, np.ndarray]:
    arrays = {name: mx.array(x) for name, x in Batch(*batch)._asdict().items() if x is not None}
    parameters = step.model.trainable_parameters()
    found = dict(tree_flatten(mx.value_and_grad(step._loss)(parameters, arrays)[1]))
    step.model.update(parameters)
    assert all(g.dtype == mx.float32 for g in found.values())
    return {name: np.array(g) for name, g in found.items()}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "final_logit_softcapping": 4.0}])
def test_loss_equals_that_of_the_logits(tiny_config, changes):
    model = Decoder(tiny_config.with_changes(**changes))
    model.init_weights(0)
    inputs, targets = mx.array(TOKENS[:, :-1]), mx.array(TOKENS[:, 1:])
    for segment_ids, weights in ((None, None), (SEGMENTS, WEIGHTS)):
        given = [None if x is None else mx.array(x) for x in (segment_ids, weights)]
        losses = cross_entropy(model(inputs, segment_ids=given[0]), targets)
        wanted = (losses * (1 if weights is None else given[1])).sum()
        assert cross_entropy_loss(model, mx.array(TOKENS), *given)[0].item() == pytest.approx(wanted.item(), rel=1e-5)


def test_loss_weights(tiny_config):
    """A weight of 2 counts a token twice, a weight of 0 not at all, over all batches of a step together."""
    other = RNG.integers(0, 300, (2, 17)).astype(np.int32)
    step, plain = a_step(tiny_config), a_step(tiny_config)
    whole = np.zeros((2, 16), np.float32)
    whole[1] = 2.0  # one batch: its second row, twice; the other batch: all of it, once
    loss, norm, _ = step([Batch(TOKENS, None, whole), Batch(other, None, np.ones((2, 16), np.float32))], 1e-2)
    same_loss, same_norm, _ = plain([Batch(TOKENS[[1, 1]]), Batch(other)], 1e-2)
    assert loss.item() == pytest.approx(same_loss.item(), rel=1e-5)
    assert norm.item() == pytest.approx(same_norm.item(), rel=1e-4)


def test_mean_loss_is_over_the_weights_of_all_batches(tiny_config):
    step = a_step(tiny_config)
    batches = [Batch(TOKENS, SEGMENTS, WEIGHTS), Batch(TOKENS, SEGMENTS, WEIGHTS * 0)]
    total = cross_entropy_loss(step.model, *map(mx.array, batches[0]))[0].item()
    loss, _, _ = step(batches, 1e-2)
    assert loss.item() == pytest.approx(total / WEIGHTS.sum(), rel=1e-5)


def test_loss_of_a_single_token(tiny_config):
    weights = np.zeros((2, 16), np.float32)
    found = []
    for weight in (0.25, 4.0, 0.0):
        weights[0, 3] = weight
        found.append([x.item() for x in a_step(tiny_config)([Batch(TOKENS, None, weights)], 1e-2)[:2]])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[2] == [0.0, 0.0]


@pytest.mark.parametrize("rows", [1, 4])
def test_errors_leave_the_model_unchanged(tiny_config, rows):
    step = a_step(tiny_config, batch_size=rows)
    before = {name: np.array(x) for name, x in step.weights().items()}
    tokens = np.resize(TOKENS, (rows, 17))
    with pytest.raises(ValueError):
        step([Batch(tokens, None, np.ones((rows, 3), np.float32))], 1e-2)
    assert all((np.array(x) == before[name]).all() for name, x in step.weights().items())
    assert step([Batch(tokens)], 1e-2)[0].item() == pytest.approx(np.log(300), rel=0.1)


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS])
@pytest.mark.parametrize(
    "fields", [{}, {"norm_placement": "post"}, {"num_hidden_layers": 3, "num_kv_shared_layers": 2}], ids=str
)
def test_grad_checkpoint_gradients_are_equal(tiny_config, segment_ids, fields):
    config = tiny_config.with_changes(**fields)
    kept, again = (gradients(a_step(config, grad_checkpoint=r), TOKENS, segment_ids, None) for r in (False, True))
    for name, gradient in kept.items():
        np.testing.assert_array_equal(again[name], gradient, err_msg=name)


def test_grad_checkpoint_repeats_the_dropout(tiny_config):
    """The gradient in some direction equals a finite difference with the same dropout."""
    step = a_step(tiny_config, dropout=0.3, grad_checkpoint=True)
    parameters = step.model.trainable_parameters()
    flat = tree_flatten(parameters)
    direction = {n: mx.random.normal(w.shape, key=mx.random.key(i)) for i, (n, w) in enumerate(flat)}

    def moved(by: float) -> float:
        mx.random.seed(7)
        step.model.load_weights([(n, w + by * direction[n]) for n, w in tree_flatten(parameters)])
        return step._loss(step.model.trainable_parameters(), {"tokens": mx.array(TOKENS)})[0].item()

    slope = (moved(1e-3) - moved(-1e-3)) / 2e-3
    step.model.update(parameters)
    mx.random.seed(7)
    found = sum((g * np.array(direction[n])).sum() for n, g in gradients(step, TOKENS, None, None).items())
    assert found == pytest.approx(slope, rel=0.02)


def test_grad_checkpoint_takes_less_memory(tiny_config, monkeypatch):
    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: 1)  # parts overlap by chance

    def peak(grad_checkpoint: bool) -> int:
        other = mx.get_active_memory()  # models of other tests
        config = tiny_config.with_changes(num_hidden_layers=8)
        step = a_step(config, grad_checkpoint=grad_checkpoint)
        batch = [Batch(np.ones((4, 129), np.int32))]
        mx.eval(step(batch, 1e-3), step.state)
        mx.reset_peak_memory()
        mx.eval(step(batch, 1e-3), step.state)
        return mx.get_peak_memory() - other

    assert peak(True) < 0.6 * peak(False)


def test_dropout_with_a_key_is_repeatable():
    x = mx.ones((40, 50))
    dropout = Dropout(0.25)
    drawn = []
    for _ in range(2):
        dropout.set_key(mx.random.key(3))
        drawn.append((dropout(x), dropout(x)))
    dropout.set_key(None)
    assert mx.array_equal(drawn[0][0], drawn[1][0]) and mx.array_equal(drawn[0][1], drawn[1][1])
    assert not mx.array_equal(*drawn[0]) and not mx.array_equal(dropout(x), dropout(x))
    values = np.array(drawn[0][0])
    assert set(np.unique(values)) == {0, np.float32(4 / 3)} and 0.2 < (values == 0).mean() < 0.3
    dropout.eval()
    assert mx.array_equal(dropout(x), x)


def test_bfloat16_weights_stay_float32(tiny_config):
    step, exact = a_step(tiny_config, dtype="bfloat16"), a_step(tiny_config)
    rounded, whole = (gradients(s, TOKENS, None, None) for s in (step, exact))
    for name, gradient in whole.items():
        difference = np.linalg.norm(rounded[name] - gradient) / np.linalg.norm(gradient)
        assert 0 < difference < 0.03, name
    # Steps far smaller than a weight's last bit in bfloat16 add up.
    before = {n: np.array(w) for n, w in step.weights().items()}
    for _ in range(2):
        loss, norm, _ = step([Batch(TOKENS)], 1e-6)
        mx.eval(loss, norm, step.state)
    assert loss.dtype == norm.dtype == mx.float32
    for name, weight in step.weights().items():
        assert weight.dtype == mx.float32
        moved = np.abs(np.array(weight) - before[name])
        assert 1e-6 < moved.max() < 3e-6, name


def test_update_ema():
    weights = RNG.normal(size=(50, 3))
    average, wanted = {"w": mx.array(weights[0], dtype=mx.float32)}, weights[0]
    for step in range(1, 50):
        average = update_ema(average, {"w": mx.array(weights[step], dtype=mx.float32)}, 0.8, mx.array(step, mx.uint64))
        decay = min(0.8, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * weights[step]
        np.testing.assert_allclose(np.array(average["w"]), wanted, atol=1e-5)


def test_ema_weights(tiny_config):
    step, plain = a_step(tiny_config, ema_decay=0.5), a_step(tiny_config)
    wanted = {n: np.array(w) for n, w in step.weights().items()}
    for i in range(1, 5):
        for s in (step, plain):
            mx.eval(s([Batch(TOKENS)], 1e-2), s.state)
        decay = min(0.5, (1 + i) / (10 + i))
        wanted = {n: decay * wanted[n] + (1 - decay) * np.array(w) for n, w in plain.weights().items()}
    raw = dict(tree_flatten(step.model.parameters()))
    for name, weight in plain.weights().items():  # the average changes nothing of the training
        assert mx.array_equal(raw[name], weight)
        assert mx.array_equal(step.save_state()[f"weights.{name}"], weight)
        np.testing.assert_allclose(np.array(step.weights()[name]), wanted[name], atol=1e-5)
    with step.evaluation_weights():
        inside = dict(tree_flatten(step.model.parameters()))
        assert all(mx.array_equal(inside[n], w) for n, w in step.weights().items())
    after = dict(tree_flatten(step.model.parameters()))
    assert all(mx.array_equal(after[n], w) for n, w in raw.items())


def test_load_checks_the_state(tiny_config):
    step, other = a_step(tiny_config, ema_decay=0.9), a_step(tiny_config, optimizer="lion")
    with pytest.raises(ValueError, match="of another model"):
        other.load(step.weights(), step.save_state())


RANDOM = np.random.default_rng(0)
SHORT = {"steps": 6, "eval_every": 0, "save_every": 0}


def divided_step(config, micro_batches, batch_size=4, loss=cross_entropy_loss, **settings):
    model = Decoder(config)
    model.init_weights(0)
    settings = TrainSettings(steps=9, learning_rate=1e-2, batch_size=batch_size, **settings)
    step = TrainStep(model, settings, loss=loss)
    assert step.match_environment(None, micro_batches) is None
    return step


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("cores", [1, 2])
def test_parts_are_the_same_step(tiny_config, monkeypatch, rows, cores):
    """Also of unequal size, with a loss mask, and with fewer rows than parts; on a CPU each core divides its rows."""
    monkeypatch.setattr(platform, "cpu_cores", lambda: cores)
    segments = np.repeat(np.array([[0] * 9 + [1] * 7]), rows, axis=0).astype(np.int32)
    batches = [
        Batch(RANDOM.integers(0, 300, (rows, 17)).astype(np.int32), segments, RANDOM.choice([0.0, 1, 2], (rows, 16)))
        for _ in range(2)
    ]
    whole, *others = (divided_step(tiny_config, n, rows) for n in (1, 2, 3, 99))
    loss, norm = (x.item() for x in whole(batches, 1e-3)[:2])
    for step in others:
        found = step(batches, 1e-3)
        assert found[0].item() == pytest.approx(loss, rel=1e-5) and found[1].item() == pytest.approx(norm, rel=1e-4)
        for name, weight in step.weights().items():
            assert np.allclose(np.array(weight), np.array(whole.weights()[name]), atol=2e-5), name


class Pairs(NamedTuple):
    """A batch of another loss."""

    first: np.ndarray
    second: np.ndarray
    margins: np.ndarray | None = None


def pair_loss(model, first, second):
    """A loss that isn't a sum over tokens."""
    losses = [cross_entropy(model(x[:, :-1]), x[:, 1:]).mean(1) for x in (first, second)]
    wins = (losses[0] < losses[1]).astype(mx.float32)
    metrics = {"accuracy": mx.stack([wins.sum(), mx.array(float(len(first)))]), "none": mx.zeros(2)}
    return nn.losses.log_cosh_loss(*losses, reduction="sum"), mx.array(2.0 * len(first)), metrics


@pytest.mark.parametrize("cores", [1, 2])
def test_another_loss(tiny_config, monkeypatch, cores):
    """Loss, gradient and metrics are divided by the sums over all parts."""
    monkeypatch.setattr(platform, "cpu_cores", lambda: cores)
    batches = [Pairs(*RANDOM.integers(0, 300, (2, 3, 17)).astype(np.int32)) for _ in range(2)]
    step = divided_step(tiny_config, 2, 3, grad_clip=0, loss=pair_loss)
    both = [mx.array(np.concatenate(x)) for x in list(zip(*batches, strict=True))[:2]]
    (loss, count, metrics), gradients = nn.value_and_grad(step.model, pair_loss)(step.model, *both)
    norm = mx.sqrt(sum(g.square().sum() for _, g in tree_flatten(gradients)))
    found_loss, found_norm, found = step(batches, 1e-3)
    assert found_loss.item() == pytest.approx((loss / count).item(), rel=1e-5)
    assert found_norm.item() == pytest.approx((norm / count).item(), rel=1e-4)
    assert found["accuracy"].item() == pytest.approx(metrics["accuracy"][0].item() / 6)
    assert np.isnan(found["none"].item())


def test_parts_take_less_memory(tiny_config, monkeypatch):
    monkeypatch.setattr(platform, "cpu_cores", lambda: 1)
    batch = Batch(RANDOM.integers(0, 300, (32, 65)).astype(np.int32))
    peaks = {}
    for micro_batches in (1, 8):
        step = divided_step(tiny_config, micro_batches, 32)
        mx.eval(step.state)
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(step([batch], 1e-3), step.state)
        peaks[micro_batches] = mx.get_peak_memory() - before
        del step
    assert peaks[8] < peaks[1] / 2


def test_resume_has_the_parts_of_before(new_run):
    """Without the argument. With another one it warns."""
    whole, broken = new_run("whole", **SHORT), new_run("broken", **SHORT)
    finish(whole, micro_batches=2)
    finish(broken, stop_at=3, micro_batches=2)
    events = finish(broken, resume=True)
    assert [e.micro_batches for e in events if isinstance(e, Started)] == [2]
    assert not [e for e in events if isinstance(e, TrainingWarning)]
    assert contents(whole.checkpoints()[-1]) == contents(broken.checkpoints()[-1])
    other = new_run("other", **SHORT)
    finish(other, stop_at=3)
    (warning,) = (e for e in finish(other, resume=True, micro_batches=4) if isinstance(e, TrainingWarning))
    assert "each batch is computed in 4 parts, before in 1" in warning.message


@pytest.mark.parametrize("invalid", [0, 9, "2", None, 2**70])
def test_invalid_numbers_of_a_checkpoint_are_not_used(tiny_config, invalid):
    step = divided_step(tiny_config, None)
    own = step.environment
    other_chip = {**own, "chip": "x", "blas": "y", "parts": 3}
    for environment in (None, other_chip, {**own, "parts": invalid}, {**own, "micro_batches": invalid}):
        step.match_environment(environment)
        assert step.environment == own
