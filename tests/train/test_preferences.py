"""DPO, ORPO and KTO: losses and gradients, the reference log-probabilities, packing of pairs, runs, the command."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.chat.sft_encoder import SFTEncoder
from mlxlm.checkpoint import load_model
from mlxlm.data import Manifest, read_documents
from mlxlm.data.manifest import SplitInfo, TrainPart
from mlxlm.data.pairs import CHOSEN, MISMATCHED, REFERENCE_FILE, REJECTED, PairBatches, PairDataset
from mlxlm.data.shards import ShardWriter
from mlxlm.evaluate.loss import sum_nll
from mlxlm.generation import load
from mlxlm.report import read_run
from mlxlm.train import Finished, Run, Step, TrainSettings, Validation, open_base_model, probe, start_finetune
from mlxlm.train.preference_losses import preference_loss
from mlxlm.utils.errors import DataError
from tests.run_command import run as run_mlxlm
from tests.small_models import arrays_of, random_decoder, write_folder
from tests.train.training_runs import contents, finish

LOSSES = ("dpo", "orpo", "kto")
QUICK = {"steps": 6, "batch_size": 2, "max_seq_length": 48, "learning_rate": 3e-3, "eval_every": 3, "save_every": 3}


@pytest.fixture(scope="session")
def base(tmp_path_factory, tiny_config, tiny_tokenizer):
    model = random_decoder(tiny_config, seed=4)
    return write_folder(tmp_path_factory.mktemp("base") / "model", model, tiny_config, tiny_tokenizer)


@pytest.fixture
def rows(make_text):
    """Forty preferences for answers that begin with "Two birds" instead of "A cat"."""
    lines = [line[:30] for line in make_text(3000).splitlines()]
    return [
        {"prompt": lines[i], "chosen": f"Two birds {lines[i + 1]}", "rejected": f"A cat {lines[i + 2]}"}
        for i in range(40)
    ]


@pytest.fixture
def new_run(tmp_path, base, rows):
    def make(name, loss, records=None, **changes):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records or rows))
        opened, tokenizer = open_base_model(base)
        encoder = SFTEncoder(tokenizer, opened.config.eos_token_ids | {tokenizer.eos_token_id})
        values = {k: v for k, v in {**QUICK, "loss": loss, **changes}.items() if v is not None}
        return start_finetune(
            tmp_path / name, opened, tokenizer, encoder, [tmp_path / f"{name}.jsonl"], settings=values
        )

    return make


# Losses, in PyTorch and in float64, of one answer at a time


def sequences(rng, sizes, vocab_size):
    """Prompts of random tokens with answers of `sizes`: (tokens, length of the prompt)."""
    return [(rng.integers(0, vocab_size, 3 + size).tolist(), 3) for size in sizes]


def torch_loss(torch, oracle, name, beta, examples):
    """The loss by the papers' formulas, summed.

    Args:
        examples: (first sequence, second sequence, kind of the first, reference log-probabilities of both).
    """

    def logp(sequence):
        ids, prompt = torch.tensor(sequence[0]), sequence[1]
        log_probs = torch.log_softmax(oracle(ids[None, :-1], use_cache=False).logits[0], -1)
        return log_probs.gather(1, ids[1:, None])[prompt - 1 :, 0]

    sigmoid, total = torch.sigmoid, 0.0
    if name == "kto":
        with torch.no_grad():
            kl = sum(logp(other).sum() - reference[1] for _, other, _, reference in examples) / len(examples)
            kl = kl.clamp(min=0)
        for answer, _, kind, reference in examples:
            ratio = logp(answer).sum() - reference[0]
            total += 1 - sigmoid(beta * (ratio - kl) if kind == CHOSEN else beta * (kl - ratio))
        return total
    for chosen, rejected, _, reference in examples:
        if name == "dpo":
            ratios = [logp(x).sum() - r for x, r in zip((chosen, rejected), reference, strict=True)]
            total += -torch.log(sigmoid(beta * (ratios[0] - ratios[1])))
        else:
            means = [logp(x).mean() for x in (chosen, rejected)]
            odds = [m - torch.log(1 - torch.exp(m)) for m in means]
            total += -means[0] - beta * torch.log(sigmoid(odds[0] - odds[1]))
    return total


def write_pairs(folder, examples, vocab_size, second_kind=REJECTED):
    """A prepared folder of training pairs, in order."""
    folder.mkdir()
    writer = ShardWriter(folder, "train", np.dtype("<u2"), 50)  # pairs are cut by the ends of shards
    for first, second, kind, _ in examples:
        for (ids, prompt), label in ((first, kind), (second, second_kind)):
            mask = np.array([0] * prompt + [label] * (len(ids) - prompt), np.uint8)
            writer.add(np.array(ids), len(ids), True, mask)
    info = writer.finish()
    manifest = Manifest("", vocab_size, "uint16", "documents", 0, [], [TrainPart("all", 1.0, info)], SplitInfo())
    return PairDataset(manifest, "train", folder, info)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_float64_torch(name, tmp_path, tiny_config):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")
    from mlxlm.families import config_to_hf

    model, rng = random_decoder(tiny_config, seed=1), np.random.default_rng(3)
    model.update({"model": {"norm": {"weight": model.model.norm.weight * 3}}})  # unequal probabilities
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_hf(tiny_config))).double()
    weights = {n: torch.from_numpy(np.array(x)).double() for n, x in arrays_of(model).items()}
    oracle.load_state_dict(weights, strict=False)
    sizes = rng.integers(1, 9, (7, 2))
    pairs = [sequences(rng, size, tiny_config.vocab_size) for size in sizes.tolist()]
    references = rng.normal(-6 * sizes - 3, 2.0).astype(np.float32)
    kinds = [CHOSEN, REJECTED] * 3 + [CHOSEN] if name == "kto" else [CHOSEN] * 7
    examples = [(*pair, k, r) for pair, k, r in zip(pairs, kinds, references.tolist(), strict=True)]
    wanted = torch_loss(torch, oracle, name, 0.3, examples)
    wanted.backward()

    second_kind = MISMATCHED if name == "kto" else REJECTED
    data = write_pairs(tmp_path / "pairs", examples, tiny_config.vocab_size, second_kind)
    batch = data.batch([range(0, 3), range(3, 4), range(4, 7)], 40, 4, None if name == "orpo" else references)
    arrays = {n: mx.array(x) for n, x in batch._asdict().items() if x is not None}
    loss = preference_loss(name, 0.3)
    found, gradients = nn.value_and_grad(model, lambda: loss(model, **arrays))()
    assert found[1].item() == 7
    np.testing.assert_allclose(found[0].item(), wanted.item(), rtol=2e-5)
    largest = max(p.grad.abs().max().item() for p in oracle.parameters())
    for parameter, gradient in tree_flatten(gradients):
        theirs = dict(oracle.named_parameters())[parameter].grad.numpy()
        np.testing.assert_allclose(np.array(gradient), theirs, atol=2e-5 * largest, err_msg=parameter)


def test_ties_and_certain_answers_have_finite_gradients(tiny_config):
    """With a model that is certain, the odds of ORPO are infinite."""
    model, ids = random_decoder(tiny_config), mx.zeros((1, 2, 9), mx.int32)
    model.update({"model": {"norm": {"weight": model.model.norm.weight * 1e4}}})
    arrays = {"tokens": ids, "segment_ids": ids[..., 1:], "mask": mx.ones((1, 2, 8)), "kinds": mx.array([[[1], [2]]])}
    for name in LOSSES:
        more = {} if name == "orpo" else {"reference_logps": mx.zeros((1, 2, 1))}
        loss = preference_loss(name, 0.1)
        found, gradients = nn.value_and_grad(model, lambda loss=loss, more=more: loss(model, **arrays, **more))()
        assert all(bool(mx.isfinite(x).all()) for x in [found[0], *dict(tree_flatten(gradients)).values()]), name


# Packing


@settings(max_examples=20)
@given(data=st.data())
def test_each_pair_is_in_one_row_of_an_epoch(tmp_path_factory, data):
    """Whole, with its own mask and reference log-probabilities, at the same place of both rows."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=12))
    rng = np.random.default_rng(0)
    examples = [(*sequences(rng, pair, 90), CHOSEN, None) for pair in sizes]
    pairs = write_pairs(tmp_path_factory.mktemp("data") / "pairs", examples, 90)
    logps = pairs.reference_logps = rng.normal(size=(len(sizes), 2)).astype(np.float32)
    length, batch_size = data.draw(st.integers(14, 40)), data.draw(st.integers(1, 3))
    batches = PairBatches(pairs, batch_size, length, seed=data.draw(st.integers(0, 9)))
    expected = sorted(
        (first[0], second[0], *r) for (first, second, _, _), r in zip(examples, logps.tolist(), strict=True)
    )
    epochs = 2 * batches.rows
    seen = [[], []]
    for row, arrays in enumerate(
        arrays for i in range(-(-epochs // batch_size)) for arrays in zip(*batches.batch(i), strict=True)
    ):
        if row < epochs:
            seen[row // batches.rows] += pairs_of(*arrays)
    assert [sorted(epoch) for epoch in seen] == [expected] * 2
    assert [pair for row in pairs.rows(length) for pair in row] == list(range(len(sizes)))
    in_order = pairs.batch(pairs.rows(length), length, pairs.pairs_per_row(length), logps)
    assert sorted(pair for arrays in zip(*in_order, strict=True) for pair in pairs_of(*arrays)) == expected


def pairs_of(tokens, segment_ids, mask, kinds, reference):
    """The pairs of a row: the ids of both documents, and the reference log-probabilities."""
    found = []
    for number in range(kinds.shape[1]):
        if not kinds[0, number]:
            assert not kinds[:, number].any() and not (mask * (segment_ids == number)).any()
            continue
        assert kinds[:, number].tolist() == [CHOSEN, REJECTED]
        documents = []
        for i in range(2):
            [at] = np.flatnonzero(segment_ids[i] == number)[:1]
            stop = int(np.flatnonzero(mask[i] * (segment_ids[i] == number))[-1]) + 2  # the mask is of targets
            assert mask[i, at : stop - 1].tolist() == [0, 0] + [1] * (stop - at - 3)
            documents.append(tokens[i, at:stop].tolist())
        found.append((*documents, *reference[:, number].tolist()))
    return found


# Records


def read(tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_documents([tmp_path / "rows.jsonl"]))


def said(messages):
    return [f"{m['role'][0]}:{m['content']}" for m in messages]


USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "yes"), ("assistant", "no")))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": [YES], "rejected": [NO]},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},  # as UltraFeedback
        {"chosen": [USER, YES], "rejected": [USER, NO]},
    ],
)
def test_formats_of_preferences(tmp_path, row):
    [document] = read(tmp_path, row)
    assert (said(document.messages), said(document.rejected)) == (["u:q", "a:yes"], ["u:q", "a:no"])
    [with_system] = read(tmp_path, {**row, "system": "Be brief."})
    assert said(with_system.rejected) == ["s:Be brief.", "u:q", "a:no"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "yes", "rejected": "no"}, "line 1: 'chosen' is text without a 'prompt'"),
        ({"prompt": "q", "chosen": 3, "rejected": "no"}, "line 1: 'chosen' is not a list"),
        ({"prompt": 5, "chosen": "yes", "rejected": "no"}, "line 1: 'content' is not text"),
        ({"prompt": "q", "chosen": [{"role": "assistant"}], "rejected": "no"}, "a message must have"),
    ],
)
def test_malformed_preferences(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, row)


# Runs


def test_reference_log_probabilities_are_those_of_the_base_model(new_run):
    run = new_run("run", "dpo")
    data, (model, _) = PairDataset.open(run.data, "train"), load_model(run.path / "checkpoints/step-0")
    for pair in range(0, len(data.starts), 7):
        for i, (start, stop) in enumerate(data.starts.documents(pair)):
            mask = (data.loss_mask(start, stop)[None, 1:] > 0).astype(np.float32)
            nats = sum_nll(model, data.slice(start, stop)[None].astype(np.int32), mask)
            assert data.reference_logps[pair, i] == pytest.approx(-nats, rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_run_learns_the_preferences_and_resumes_to_the_bit(new_run, monkeypatch, loss):
    whole, parts = new_run("whole", loss), new_run("parts", loss)
    monkeypatch.setattr("mlxlm.train.preferences.answer_logps", None)  # nothing is computed again
    events = finish(whole, resume=True)
    finish(parts, resume=True, stop_at=4)
    finish(Run.open(parts.path), resume=True)
    assert contents(parts.path / "checkpoints/step-6") == contents(whole.path / "checkpoints/step-6")
    first, last = [e for e in events if isinstance(e, Validation)][::2]
    assert last.loss < first.loss and last.best and isinstance(events[-1], Finished)
    margins = [e.metrics["rewards/chosen"] - e.metrics["rewards/rejected"] for e in (first, last)]
    assert margins[1] > margins[0]
    if loss != "orpo":  # before the first step the model is the reference
        assert first.loss == pytest.approx(np.log(2) if loss == "dpo" else 0.5, abs=1e-5)
    assert first.perplexity == pytest.approx(np.exp(first.metrics["nll_loss"]))
    steps = [e for e in events if isinstance(e, Step)]
    history = read_run(whole.path)
    for name, values in history.loss_metrics.items():
        assert values == [(e.step, e.metrics[name]) for e in steps if np.isfinite(e.metrics[name])]
    assert history.validation_metrics["nll_loss"][0] == (0, first.metrics["nll_loss"])
    assert "rewards/chosen" in (whole.path / "report.html").read_text() and history.loss_title == f"{loss} loss"
    assert whole.resume_command.startswith("mlxlm finetune")


def test_changed_reference_log_probabilities_are_refused(new_run):
    run = new_run("run", "dpo")
    file, other = run.data / REFERENCE_FILE, new_run("other", "dpo", seed=1).data / REFERENCE_FILE
    original = file.read_bytes()
    for content, message in (
        (other.read_bytes(), "is of other data"),
        (original[:100], "is damaged"),
        (None, "is gone"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            finish(run, resume=True)


def test_parts_of_a_step(new_run, monkeypatch):
    """DPO and ORPO are the same however a batch is divided."""
    for loss in ("dpo", "orpo"):
        losses = []
        for micro_batches in (1, 2):
            events = finish(new_run(f"{loss}-{micro_batches}", loss, steps=2), resume=True, micro_batches=micro_batches)
            losses.append([e.loss for e in events if isinstance(e, Step)])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_pairs_that_do_not_fit_and_equal_answers_are_left_out(new_run, rows):
    long = {"prompt": "a", "chosen": "b " * 99, "rejected": "c"}
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    run = new_run("run", "dpo", [*rows, long, same, same])
    entry = json.loads((run.path / "log.jsonl").read_text().splitlines()[0])
    assert (entry["chosen"], entry["too_long"], entry["same"]) == (40, 1, 2)
    assert entry["suggested_seq_length"] == 128 and Manifest.read(run.data).train.documents % 2 == 0
    with pytest.raises(DataError, match="nothing of all is left to train on"):
        new_run("other", "dpo", [long] * 30)


def test_kto_pairs_an_answer_with_that_of_the_row_before(new_run, tiny_tokenizer):
    """Labels alone, or chosen and rejected answers as two examples."""
    labeled = [{"prompt": f"q{i}.", "completion": f"a{i}.", "label": i % 2 == 0} for i in range(30)]
    pairs = [{"prompt": f"q{i}.", "chosen": f"a{i}.", "rejected": f"b{i}."} for i in range(30)]
    for name, records, answers in (("labeled", labeled, 1), ("pairs", pairs, 2)):
        run = new_run(name, "kto", records)
        data = PairDataset.open(run.data, "train")
        assert len(data.starts) >= 27 * answers
        for pair in range(len(data.starts)):
            texts, kinds = [], []
            for start, stop in data.starts.documents(pair):
                texts.append(tiny_tokenizer.decode(data.slice(start, stop).tolist()))
                kinds.append(int(data.loss_mask(start, stop).max()))
            number = int(texts[0].partition("q")[2].partition(".")[0])
            if number == 0:
                assert kinds[1] == 0
                continue
            assert f"q{number}." in texts[1] and f"a{number - 1}." in texts[1] and kinds[1] == MISMATCHED
            answer = {"pairs": {CHOSEN: "a", REJECTED: "b"}, "labeled": {CHOSEN: "a", REJECTED: "a"}}[name][kinds[0]]
            assert f"{answer}{number}." in texts[0]
            assert name == "pairs" or kinds[0] == (CHOSEN if number % 2 == 0 else REJECTED)


def test_benchmark_of_a_step(tiny_config):
    for loss in LOSSES:
        settings = TrainSettings(steps=1, learning_rate=1.0, batch_size=2, max_seq_length=32, loss=loss)
        assert probe(tiny_config, settings).step > 0 and settings.tokens_per_step == 128


def test_command(base, rows, tmp_path):
    data, out = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["finetune", str(base), str(data), "--out", str(out), "--max-seq-length", "48", "--steps", "2"]
    code, _, error = run_mlxlm(*command, "--loss", "dpo", "--beta", "0.2", "--batch-size", "2")
    assert code == 0 and "40 chosen and 40 rejected answers" in error and "rewards/margins" in error, error
    assert load(out).config.hidden_size == 32 and Run.open(out).settings.beta == 0.2
    shutil.rmtree(out)
    for options, message in (
        ([], "line 1 is a preference, not a conversation (try: --loss dpo, orpo or kto"),
        (["--beta", "0.2"], "--beta"),
        (["--loss", "dpo", "--beta", "0"], "beta is 0"),
    ):
        code, _, error = run_mlxlm(*command, *options)
        assert code in (1, 2) and message in error, error
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    code, _, error = run_mlxlm(*command, "--loss", "kto")
    assert code == 1 and "is not a preference" in error, error
