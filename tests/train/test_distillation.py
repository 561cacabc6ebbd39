"""Learning from a teacher, and with quantized weights: the loss of a step, whole runs, what is refused."""

import re
import shutil

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import load_model, open_checkpoint, open_tokenizer
from mlxlm.checkpoint.load import load_float32_weights
from mlxlm.convert.compare import kl_divergence
from mlxlm.data import Batch, TokenDataset
from mlxlm.kernels import log_softmax
from mlxlm.train import Run, TokenizerOptions, TrainSettings, Validation, start_run
from mlxlm.train.distillation import load_teacher, quantized_weights
from mlxlm.train.objectives import make_loss
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import ConfigError
from tests.run_command import run as mlxlm
from tests.small_models import arrays_of, random_decoder, write_folder
from tests.train.training_runs import QUICK, contents, finish, read_log

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_config, tiny_tokenizer):
    """Another architecture, with twelve more rows of the embedding than tokens, and dropout in its training mode."""
    config = tiny_config.with_changes(
        hidden_size=48, num_hidden_layers=1, vocab_size=tiny_tokenizer.vocab_size + 12, tie_word_embeddings=False
    )
    return write_folder(tmp_path_factory.mktemp("teacher") / "model", random_decoder(config, 7), config, tiny_tokenizer)


def torch_loss(student, teacher, batch, settings):
    """The mean loss, cross-entropy and KL divergence by PyTorch in float64."""
    tokens, _, weights = batch
    inputs, targets = mx.array(tokens[:, :-1]), torch.tensor(tokens[:, 1:].flatten()).long()
    z, taught = (torch.tensor(np.array(m(inputs)[..., :300])).double().flatten(0, 1) for m in (student, teacher))
    temperature, weights = settings.kd_temperature, torch.tensor(weights).double().flatten()
    kl = torch.nn.functional.kl_div(
        torch.log_softmax(z / temperature, -1), torch.softmax(taught / temperature, -1), reduction="none"
    ).sum(-1)
    cross_entropy = torch.nn.functional.cross_entropy(z, targets, reduction="none")
    kl, cross_entropy = ((x * weights).sum().item() / weights.sum().item() for x in (kl, cross_entropy))
    ratio = settings.kd_ratio
    return (1 - ratio) * cross_entropy + ratio * temperature**2 * kl, cross_entropy, kl


@pytest.mark.parametrize("quantization", [None, {"bits": 3, "group_size": 32}])
def test_the_loss_of_a_step(teacher, tiny_config, quantization):
    rng = np.random.default_rng(0)
    batch = Batch(
        rng.integers(0, 300, (4, 17)).astype(np.int32), None, rng.choice([0.0, 1.0], (4, 16)).astype(np.float32)
    )
    settings = TrainSettings(
        steps=1, learning_rate=1e-2, batch_size=4, max_seq_length=16, optimizer="lion", weight_decay=0.0,
        teacher=str(teacher), kd_ratio=0.3, kd_temperature=2.0, quantization=quantization,
    )  # fmt: skip
    model = random_decoder(tiny_config)
    model.train()
    step = TrainStep(model, settings, loss=make_loss(settings))
    before, taught = arrays_of(random_decoder(tiny_config)), load_teacher(str(teacher), "float32")
    taught_before = {name: mx.array(x) for name, x in arrays_of(taught).items()}
    with quantized_weights(random := random_decoder(tiny_config), quantization):
        wanted = torch_loss(random, taught, batch, settings)
    loss, _, metrics = step([batch], 1e-2)
    mx.eval(step.state)
    assert [loss.item(), metrics["cross_entropy"].item(), metrics["kl"].item()] == pytest.approx(wanted, rel=1e-5)
    after = arrays_of(model)  # Lion moves each weight by the learning rate, or not at all
    moved = {name: mx.abs(after[name] - before[name]).max().item() for name in before}
    assert set(moved) == set(after) and all(x == pytest.approx(1e-2, rel=1e-3) for x in moved.values())
    assert all(mx.array_equal(x, taught_before[name]) for name, x in arrays_of(taught).items())


def test_the_gradient_is_straight_through(tiny_config):
    """It is that of the quantized weights, for the weights."""
    settings = TrainSettings(steps=1, learning_rate=1e-2, quantization={"bits": 4, "group_size": 32})
    tokens, model = mx.array(np.arange(34).reshape(2, 17)), random_decoder(tiny_config)

    def gradients(loss_of, model):
        def loss(parameters):
            model.update(parameters)
            return make_loss(loss_of)(model, tokens=tokens)[0]

        return dict(tree_flatten(mx.grad(loss)(model.trainable_parameters())))

    found = gradients(settings, model)
    model = random_decoder(tiny_config)
    with quantized_weights(model, settings.quantization):
        wanted = gradients(TrainSettings(steps=1, learning_rate=1e-2), model)
    for name, gradient in found.items():
        assert mx.allclose(gradient, wanted[name], atol=1e-5), name


def test_quantized_weights_are_those_of_mlxlm_quantize(tmp_path, tiny_config, tiny_tokenizer):
    model = random_decoder(tiny_config)
    folder = write_folder(tmp_path / "model", model, tiny_config, tiny_tokenizer)
    assert mlxlm("quantize", folder, "--method", "rtn", "--bits", 3, "--out", tmp_path / "q", "--no-evaluate")[0] == 0
    wanted = load_float32_weights(open_checkpoint(tmp_path / "q"))
    before = dict(arrays_of(model))
    settings = TrainSettings(steps=1, learning_rate=1.0, quantization={"bits": 3, "group_size": 64})
    with quantized_weights(model, settings.quantization):
        found = dict(arrays_of(model))
    assert all(mx.array_equal(x, before[name]) for name, x in arrays_of(model).items())
    for name, x in wanted.items():
        tolerance = 0 if x.ndim > 1 else 1e-3  # norms have 16 bits there
        assert mx.allclose(found[name], x, atol=tolerance, rtol=0), name
    assert any(not mx.array_equal(found[name], before[name]) for name in before)


def test_runs(teacher, tmp_path, text_file):
    """A new model takes the tokenizer of its teacher; a resumed run ends with the same weights."""
    model = ["--preset", "0.3m", "--batch-size", 2, "--max-seq-length", 16, "--eval-tokens", 100, "--save-every", 2]
    options = [*model, "--teacher", teacher, "--kd-ratio", 0.9, "--teacher-top-k", 5, "--quantize-bits", 4]
    code, _, err = mlxlm("pretrain", text_file, "--out", tmp_path / "run", "--steps", 4, *options)
    assert code == 0, err
    run = Run.open(tmp_path / "run")
    assert run.config.vocab_size == 300 and run.settings.quantization["bits"] == 4
    assert all(e["kl"] > 0 and 4 < e["cross_entropy"] < 7 for e in read_log(run) if e["event"] == "step")
    last = contents(run.path / "checkpoints/step-4")
    shutil.rmtree(run.path / "checkpoints/step-4")
    finish(run, resume=True)
    assert contents(run.path / "checkpoints/step-4") == last


def test_recovery(tmp_path, tiny_config, tiny_tokenizer, text_file):
    """A trained model, trained further with 2-bit weights, is closer to itself after it was quantized."""
    settings = {**QUICK, "steps": 40, "learning_rate": 1e-2, "eval_every": 0}
    run = start_run(
        tmp_path / "run", [text_file], tiny_config, tokenizer=TokenizerOptions(vocab_size=300), settings=settings
    )
    finish(run)
    quantization = {"bits": 2, "group_size": 32}
    recovery = {
        "teacher": run.path,
        "kd_ratio": 1.0,
        "quantization": quantization,
        "learning_rate": 2e-3,
        "eval_every": 20,
    }
    better = start_run(tmp_path / "better", [text_file], init=run.path, settings={**settings, **recovery})
    validations = [e for e in finish(better, resume=True) if isinstance(e, Validation)]
    assert validations[-1].best and validations[-1].loss < 0.5 * validations[0].loss  # of the quantized weights

    original, _ = load_model(run.path)
    data = TokenDataset.open(run.data, "validation")
    tokens = mx.array(data.slice(0, 300).reshape(-1, 20))

    def divergence(path):
        with quantized_weights(model := load_model(path)[0], quantization):
            return kl_divergence(log_softmax(original(tokens)), log_softmax(model(tokens))).mean().item()

    assert divergence(better.path) < 0.5 * divergence(run.path)


def test_what_is_refused(teacher, tmp_path, text_file, tiny_config, tokenizer_folder):
    own = ["--preset", "0.3m", "--steps", 2, "--batch-size", 2, "--out", tmp_path / "run"]
    for code, message, arguments in (
        (
            1,
            "the teacher .* has another vocabulary .try: a teacher with the same tokenizer",
            ["--tokenizer", "small-world"],
        ),
        (1, "200 tokens are longer than the teacher's context .try: --max-seq-length 128", ["--max-seq-length", 200]),
        (2, "--vocab-size would have no effect: the model has the tokenizer of --teacher", ["--vocab-size", 400]),
    ):
        found, _, err = mlxlm("pretrain", text_file, *own, "--teacher", teacher, *arguments)
        assert found == code and re.search(message, err), err
    for code, message, arguments in (
        (2, "--kd-ratio would have no effect: --teacher is not given", ["--kd-ratio", 0.5]),
        (1, "cannot read nowhere: no such file", ["--teacher", "nowhere"]),
    ):
        found, _, err = mlxlm("pretrain", text_file, *own, *arguments)
        assert found == code and re.search(message, err), err
    larger = tiny_config.with_changes(vocab_size=320)
    folder = write_folder(tmp_path / "larger", random_decoder(larger), larger, open_tokenizer(tokenizer_folder))
    with pytest.raises(ConfigError, match="has logits for 312 tokens, the model 320"):
        start_run(tmp_path / "run", [text_file], init=folder, settings={**QUICK, "teacher": teacher})
    with pytest.raises(ConfigError, match="bits is 7, affine has 2 or 3"):
        TrainSettings(steps=1, learning_rate=1.0, quantization={"bits": 7, "group_size": 32})
    with pytest.raises(ConfigError, match="teacher is 'x', but the loss dpo has no teacher: omit it"):
        TrainSettings(steps=1, learning_rate=1.0, loss="dpo", teacher="x")
    assert not (tmp_path / "run").exists()
