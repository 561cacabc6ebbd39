"""GRPO: advantages and gradients, sampling, reward functions, runs that are interrupted, the command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import load_model
from mlxlm.data.prompts import PromptRecord, prompt_order
from mlxlm.generation import run_batch
from mlxlm.train import (
    Finished,
    GRPOOptions,
    RewardError,
    Run,
    Step,
    Stopped,
    TrainSettings,
    Validation,
    open_base_model,
    start_grpo,
)
from mlxlm.train.grpo import GRPOBatches, Rewards, group_advantages, grpo_loss, make_batches
from mlxlm.train.objectives import make_loss
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import ConfigError, DataError
from tests.run_command import run as run_mlxlm
from tests.small_models import random_decoder, write_folder
from tests.train.training_runs import contents, finish, read_log

QUICK = {"steps": 4, "batch_size": 4, "grad_accumulation_steps": 2, "learning_rate": 3e-3, "save_every": 2}
OPTIONS = {"num_generations": 4, "max_tokens": 6}
RNG = np.random.default_rng(0)
# Answers of 1 to 6 tokens to two prompts; the rewards of the second group are equal in the last test case
ROWS = [([3, 5, 7][: 1 + i // 4], RNG.integers(10, 300, n).tolist()) for i, n in enumerate((1, 6, 2, 4, 3, 3, 6, 5))]
REWARDS = np.array([[0.0, 1.0, 0.25, 1.0], [2.0, -1.0, 0.5, 0.5]])


@pytest.fixture(scope="session")
def base(tmp_path_factory, tiny_config, tiny_tokenizer):
    folder, model = tmp_path_factory.mktemp("base") / "model", random_decoder(tiny_config, seed=4)
    return write_folder(folder, model, tiny_config, tiny_tokenizer)


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": f"the cat sat {n}", "letter": "ae"[n % 2], "unused": None} for n in range(10)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


def count_letters(prompt, completion, letter):
    return completion.count(letter)


@pytest.fixture
def new_run(tmp_path, base, prompts):
    def make(name, reward=count_letters, sources=(prompts,), options=None, **settings):
        arguments = {"options": GRPOOptions(**{**OPTIONS, **(options or {})}), "settings": {**QUICK, **settings}}
        return start_grpo(tmp_path / name, *open_base_model(base), list(sources), reward, **arguments)

    return make


def some_settings(**options) -> TrainSettings:
    rows = {"batch_size": 4, "grad_accumulation_steps": 2, "max_seq_length": 20, "grad_clip": 0}
    return TrainSettings(steps=9, learning_rate=1e-3, **rows, grpo=GRPOOptions(**OPTIONS, **options))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_equals_that_of_the_published_objective(base, loss_type, temperature):
    """In float64 PyTorch, from the log-probabilities: Shao et al. 2024, eq. 3; DAPO, eq. 8; Dr. GRPO, 3.2."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    objective = torch.zeros((), dtype=torch.float64)
    for group, rewards in zip((ROWS[:4], ROWS[4:]), torch.tensor(REWARDS), strict=True):
        for (prompt, answer), reward in zip(group, rewards, strict=True):
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(answer)), torch.tensor(answer)]
            ratios = torch.exp(logprobs - logprobs.detach())
            advantage = reward - rewards.mean()
            if loss_type != "dr_grpo":
                advantage = advantage / (rewards.std() + 1e-4)
            surrogate = torch.minimum(ratios * advantage, ratios.clamp(0.8, 1.2) * advantage)
            tokens = sum(len(other) for _, other in ROWS)
            divisor = {"dapo": tokens, "grpo": len(answer) * len(ROWS), "dr_grpo": 6 * len(ROWS)}[loss_type]
            objective = objective + surrogate.sum() / divisor
    (-objective).backward()

    settings = some_settings(loss_type=loss_type, temperature=temperature)
    model, _ = load_model(base)
    batches = make_batches(ROWS, REWARDS, np.zeros(8, bool), settings)

    def loss_of_all(parameters):
        model.update(parameters)
        arrays = [{name: mx.array(x) for name, x in batch._asdict().items()} for batch in batches]
        return sum(grpo_loss(model, temperature=temperature, **batch)[0] for batch in arrays) / 8

    found = dict(tree_flatten(mx.grad(loss_of_all)(model.trainable_parameters())))
    gradients = {name: parameter.grad.numpy() for name, parameter in oracle.named_parameters()}
    for name, wanted in gradients.items():
        assert np.abs(np.array(found[name]) - wanted).max() < 1e-5 * max(1e-3, np.abs(wanted).max()), name
    model, _ = load_model(base)
    step = TrainStep(model, settings, loss=make_loss(settings))
    _, norm, metrics = step(batches, 1e-3)
    assert norm.item() == pytest.approx(np.sqrt(sum((g**2).sum() for g in gradients.values())), rel=1e-4)
    assert metrics["reward"].item() == pytest.approx(REWARDS.mean()) and metrics["length"].item() == 30 / 8


@given(st.lists(st.lists(st.integers(-4, 4), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(-9, 9))
def test_advantages_are_relative_to_the_group(rewards, shift):
    rewards = np.array(rewards, np.float64)
    for scale in (False, True):
        advantages = group_advantages(rewards, scale=scale)
        assert np.abs(advantages.sum(1)).max() < 1e-9
        np.testing.assert_allclose(group_advantages(rewards + shift, scale=scale), advantages, atol=1e-9)
        order = np.sign(rewards[:, :, None] - rewards[:, None]) * (advantages[:, :, None] - advantages[:, None])
        assert (order >= 0).all() and ((np.ptp(rewards, axis=1) > 0) == advantages.any(1)).all()
        if scale:
            spread = advantages.std(1, ddof=1)
            assert ((spread == 0) | (np.abs(spread - 1) < 1e-3)).all()


@given(st.integers(1, 7), st.integers(0, 30), st.integers(1, 20))
def test_every_epoch_has_each_prompt_once(count, first, number):
    whole = list(prompt_order(count, 0, 8 * count, seed=3))
    assert all(sorted(whole[i : i + count]) == list(range(count)) for i in range(0, len(whole), count))
    whole = list(prompt_order(count, 0, first + number, seed=3))
    assert list(prompt_order(count, first, number, seed=3)) == whole[first:]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_sampled_tokens_have_the_same_probability_in_training(new_run, base, tiny_tokenizer, monkeypatch, dtype, bound):
    """The engine reports the log-probability of each token that it draws; training computes it from the whole row."""
    found = []

    def recording(engine, requests):
        logged = [replace(request, options=replace(request.options, logprobs=0)) for request in requests]
        results = dict(run_batch(engine, logged))
        found.extend(sum(token.logprob for token in results[i].logprobs) for i in range(len(logged)))
        yield from results.items()

    monkeypatch.setattr("mlxlm.train.grpo.run_batch", recording)
    run = new_run("run")
    run = replace(run, settings=replace(run.settings, dtype=dtype))
    model, _ = load_model(base)
    weights, start = tree_flatten(model.parameters()), len(tiny_tokenizer.encode("the cat sat 1"))
    grpo = GRPOBatches(run, model, tiny_tokenizer, count_letters)
    batches = grpo.read_step(1)
    rows = [(tokens, int(n)) for batch in batches for tokens, n in zip(batch.tokens, batch.length, strict=True)]
    again, other = (np.concatenate([batch.tokens for batch in grpo.read_step(step)]) for step in (1, 2))
    assert [len(batch.tokens) for batch in batches] == [4, 4] and model.training
    assert np.array_equal([tokens for tokens, _ in rows], again)
    assert len({tuple(tokens[start:]) for tokens in [*again, *other]}) == 16  # all answers have seeds of their own
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], weight) for name, weight in weights)
    model.set_dtype(getattr(mx, dtype))
    for (tokens, length), logprob in zip(rows, found[:8], strict=True):
        mask = np.zeros((1, len(tokens) - 1), np.float32)
        mask[0, start - 1 : start - 1 + length] = 1
        loss, _, _ = grpo_loss(model, mx.array(tokens[None]), mx.array(mask))
        assert loss.item() == pytest.approx(-logprob, abs=bound)


def test_interrupted_run_samples_the_same_and_is_bit_equal(new_run):
    """Stopped once, and once failed in its reward function, which keeps the steps before."""
    whole, parts = new_run("whole"), new_run("parts")
    events = finish(whole, resume=True, reward=count_letters)
    assert isinstance(events[-1], Finished) and [e.step for e in events if isinstance(e, Step)] == [1, 2, 3, 4]
    assert finish(parts, resume=True, reward=count_letters, stop_at=1)[-1] == Stopped(1, parts.path)
    calls = []

    def failing(prompt, completion, letter):
        calls.append(completion)
        return 1 / (len(calls) < 20) * count_letters(prompt, completion, letter)

    with pytest.raises(RewardError, match=r"failed for .*prompts.jsonl, line \d+: ZeroDivisionError: division by zero"):
        finish(Run.open(parts.path), resume=True, reward=failing)
    assert [path.name for path in parts.checkpoints()] == ["step-2", "step-3"]
    finish(Run.open(parts.path), resume=True, reward=count_letters)
    assert contents(whole.path / "checkpoints/step-4") == contents(parts.path / "checkpoints/step-4")
    steps, again = ([e for e in read_log(run) if e["event"] == "step"] for run in (whole, parts))
    names = ("loss", "grad_norm", "reward", "no_signal", "length", "truncated")
    assert [[e[name] for name in names] for e in steps] == [[e[name] for name in names] for e in again]
    assert all(0 <= e["no_signal"] <= 1 and 1 <= e["length"] <= 6 for e in steps)


def test_rewards_rise(new_run):
    """The probability of a letter that is rewarded rises, also that of greedy answers to prompts that are held out."""
    run = new_run("run", steps=12, learning_rate=2e-2, options={"num_generations": 8}, batch_size=16)
    events = finish(run, resume=True, reward=lambda prompt, completion: completion.count("e"))
    rewards = [e.metrics["reward"] for e in events if isinstance(e, Step)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 1
    validations = [e for e in events if isinstance(e, Validation)]
    rewards = [e.metrics["reward"] for e in validations]
    best = max(rewards)
    assert best > rewards[0] and [e.metrics["reward"] for e in validations if e.best][-1] == best
    state = json.loads((run.path / "checkpoints" / f"step-{run.settings.steps}" / "state.json").read_text())
    assert state["best"]["loss"] == -best


PROMPT = PromptRecord("a.jsonl, line 1", "2 + 2 =", {"answer": "4", "other": 5})


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda prompt, completion, answer: completion == answer, 1.0),
        (lambda prompt, completion: np.float32(0.5), 0.5),
        (lambda prompt, answer, other: mx.array(other), 5.0),  # `answer` is the completion
        (lambda p, c, **fields: sorted(fields) == ["answer", "other"], 1.0),
        (lambda p, c, missing=3: missing, 3.0),
    ],
)
def test_reward_functions_get_the_fields_they_name(function, wanted):
    Rewards(function).check([PROMPT])
    assert Rewards(function)(PROMPT, "4") == wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "good", [1.0, 2.0]])
def test_rewards_are_finite_numbers(value):
    with pytest.raises(RewardError, match="the reward for a.jsonl, line 1 is .* .try: a finite number"):
        Rewards(lambda prompt, completion: value)(PROMPT, "4")


def test_start_errors(new_run, tmp_path, prompts):
    def sources(text):
        (tmp_path / "bad.jsonl").write_text(text)
        return [tmp_path / "bad.jsonl"]

    with pytest.raises(DataError, match="prompts.jsonl, line 1 doesn't fit .* missing a required argument: 'solution'"):
        new_run("run", reward=lambda prompt, completion, solution: 0)
    with pytest.raises(DataError, match="bad.jsonl, line 2 has no 'prompt'"):
        new_run("run", sources=sources('{"prompt": "a"}\n{"question": "b"}\n'))
    with pytest.raises(DataError, match="bad.jsonl, line 1 is not JSON"):
        new_run("run", sources=sources("a\n"))
    with pytest.raises(DataError, match="bad.jsonl has no prompts"):
        new_run("run", sources=sources("\n"))
    with pytest.raises(DataError, match="1 of 1 prompts are held out .* .try: more prompts"):
        new_run("run", reward=lambda p, c: 0, sources=sources('{"prompt": "a"}\n'))
    with pytest.raises(DataError, match="line 1 has 1[0-9]+ tokens, which leave 0 for an answer .try: a shorter"):
        new_run("run", reward=lambda p, c: 0, sources=sources('{"prompt": "%s"}\n{"prompt": "a"}\n' % ("cat " * 150)))
    with pytest.raises(DataError, match=r"bad.jsonl, line \d: .*has no chat template"):
        new_run("run", reward=lambda p, c: 0, sources=sources('{"prompt": [{"role": "user", "content": "a"}]}\n' * 2))
    with pytest.raises(ConfigError, match="a step has 6 answers, it must be a multiple of num_generations, 4"):
        new_run("run", batch_size=3)
    assert not (tmp_path / "run").exists()
    run = new_run("run")
    with pytest.raises(
        ConfigError, match="run needs its reward function .try: mlxlm grpo --resume .*run --reward FILE"
    ):
        finish(run, resume=True)
    (run.data / "validation.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="validation.jsonl has (changed|other fields)"):
        finish(run, resume=True, reward=count_letters)


def test_command(tmp_path, base, prompts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def reward(prompt, completion):\n    return len(completion)\n\nbest = 3\n")
    arguments = ["grpo", base, prompts, "--out", "run", "--steps", 1, "--num-generations", 2, "--batch-size", 4]
    code, out, err = run_mlxlm(*arguments, "--max-tokens", 4, "--reward", "reward.py")
    assert (code, out) == (0, "run\n") and "validation: mean reward" in err, err
    assert Run.open(Path("run")).resume_command == "mlxlm grpo --resume run --reward reward.py"
    assert "nothing was left to do" in run_mlxlm("grpo", "--resume", "run", "--reward", "reward.py:reward")[2]
    for reward, wanted in (
        ("missing.py", "there is no file missing.py with a reward function"),
        ("reward.py:score", "reward.py has no function score (try: --reward reward.py:reward)"),
        ("reward.py:best", "reward.py has no function best"),
        ("broken.py", "broken.py failed: SyntaxError"),
    ):
        (tmp_path / "broken.py").write_text("def reward(:")
        code, _, err = run_mlxlm(*arguments[:3], "--out", "other", "--reward", reward)
        assert code == 1 and wanted in err and not (tmp_path / "other").exists()
    assert "--reward is missing" in run_mlxlm(*arguments)[2]
