"""Strided windows against a loop over single tokens, and against transformers."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.data import read_documents
from mlxlm.evaluate import loss as loss_module
from mlxlm.evaluate.loss import TextLoss, evaluate_text, first_tokens, windows
from mlxlm.generation import score
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError

TEXT = "The quick brown fox jumps. Grüße, 世界!\nHow are you, lazy dog?\n" * 6


def read(text):
    return read_documents(["-"], stdin=io.BytesIO(text.encode()))


def windowed_loss(logprobs, ids, context_length, stride):
    """The loss with each token predicted in its first window; windows start at multiples of the stride."""
    targets = {}
    for target in range(1, len(ids)):
        targets.setdefault(-(-max(0, target - context_length) // stride) * stride, []).append(target)
    return -sum(logprobs(ids[begin : last[-1] + 1])[0][-len(last) :].sum() for begin, last in targets.items())


@pytest.mark.parametrize(("context_length", "stride"), [(128, 128), (128, 64), (20, 20), (20, 7), (20, 1), (1, 1)])
def test_each_token_is_predicted_once(lm, logprobs, context_length, stride):
    found = evaluate_text(lm, read(TEXT), context_length=context_length, stride=stride)
    ids = lm.tokenizer.encode(TEXT)
    assert found.tokens == len(ids) - 1  # BOS is in front of the text
    assert (found.bytes, found.characters, found.documents) == (len(TEXT.encode()), len(TEXT), 1)
    assert found.nats == pytest.approx(windowed_loss(logprobs, ids, context_length, stride), rel=1e-5)
    assert found.loss == found.nats / found.tokens and found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / len(TEXT.encode()))
    assert found.bits_per_character == pytest.approx(found.nats / math.log(2) / len(TEXT))


@given(
    sizes=st.lists(st.integers(0, 12), max_size=8),
    context_length=st.integers(1, 12),
    share=st.floats(0, 1, exclude_min=True),
)
@settings(max_examples=60)
def test_windows_predict_each_token_once_for_any_chunks(sizes, context_length, share):
    stride = max(1, math.ceil(share * context_length))
    ids = iter(range(sum(sizes)))
    chunks = [[next(ids) for _ in range(size)] for size in sizes]
    seen = []
    for window, new in windows(iter(chunks), context_length, stride):
        assert 2 <= len(window) <= context_length + 1 and window == list(range(window[0], window[0] + len(window)))
        for target in window[-new:]:
            assert target - window[0] >= min(target, context_length - stride)
        seen += window[-new:]
    assert seen == list(range(1, sum(sizes)))


def test_texts_of_different_lengths(lm, logprobs, tmp_path):
    rows = ["The", "quick brown " * 9, "a", "fox " * 30, "Grüße", "lazy dog. " * 20] * 3
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    found = evaluate_text(lm, read_documents([tmp_path / "a.jsonl"]), context_length=40, stride=13)
    each = [windowed_loss(logprobs, lm.tokenizer.encode(row), 40, 13) for row in rows[:6]]
    assert found.nats == pytest.approx(3 * sum(each), rel=1e-5) and found.documents == 18
    assert found.characters == sum(map(len, rows))


def test_short_texts_fill_batches(lm, monkeypatch):
    shapes, real = [], loss_module.sum_nll

    def counted(model, tokens, *values, **names):
        shapes.append(tokens.shape)
        return real(model, tokens, *values, **names)

    monkeypatch.setattr(loss_module, "sum_nll", counted)
    monkeypatch.setattr(loss_module, "_BATCH_TOKENS", 128)
    found = evaluate_text(lm, (document for _ in range(70) for document in read("The cat")), context_length=128)
    columns = len(lm.tokenizer.encode("The cat"))
    assert found.documents == 70 and columns in range(4, 8)
    assert shapes == [(32, columns), (32, columns), (6, columns)]
    shapes.clear()
    evaluate_text(lm, read(TEXT), context_length=128)
    assert all(rows == 1 for rows, _ in shapes)


def test_first_token_without_bos_is_not_predicted(lm, logprobs):
    class Bare(Tokenizer):
        def __init__(self):
            self.__dict__ = dict(lm.tokenizer.__dict__)

        def encode(self, text, *, add_special_tokens=True, **kind):
            return super().encode(text, add_special_tokens=False, **kind)

        @property
        def prefix_token_ids(self):
            return []

    bare = replace(lm, tokenizer=Bare())
    found = evaluate_text(bare, read(TEXT), context_length=32, stride=32)
    ids = lm.tokenizer.encode(TEXT, add_special_tokens=False)
    first = lm.tokenizer.decode(ids[:1])
    assert found.tokens == len(ids) - 1
    assert found.bytes == len(TEXT.encode()) - len(first.encode())
    assert found.characters == len(TEXT) - len(first)
    assert found.nats == pytest.approx(windowed_loss(logprobs, ids, 32, 32), rel=1e-5)


def test_pieces_do_not_change_the_loss(lm, monkeypatch):
    monkeypatch.setattr("mlxlm.data.text.PIECE_CHARS", 1000)
    text = TEXT * 25  # about 10 pieces
    whole = evaluate_text(lm, read(text), context_length=128, stride=128)
    assert whole.tokens == len(lm.tokenizer.encode(text)) - 1 and whole.characters == len(text)
    monkeypatch.setattr(loss_module, "_PIECES", 1)
    again = evaluate_text(lm, read(text), context_length=128, stride=128)
    assert (again.nats, again.tokens) == (whole.nats, whole.tokens)


def test_quantized_and_mlx_lm_models(lm):
    from mlxlm.backend.mlx import nn

    class OnlyCallable:
        def __call__(self, tokens, cache=None):
            return lm.model(tokens)

    plain = evaluate_text(lm, read(TEXT), context_length=32, stride=8)
    foreign = evaluate_text(replace(lm, model=OnlyCallable()), read(TEXT), context_length=32, stride=8)
    assert foreign.nats == pytest.approx(plain.nats, rel=1e-5) and foreign.tokens == plain.tokens
    copy = type(lm.model)(lm.config)
    copy.update(lm.model.parameters())
    nn.quantize(copy, group_size=32, bits=8)

    class OnlyCallableQuantized:
        def __call__(self, tokens, cache=None):
            return copy(tokens)

    found, called = (
        evaluate_text(replace(lm, model=m), read(TEXT), context_length=32, stride=32)
        for m in (copy, OnlyCallableQuantized())
    )
    assert found.nats == pytest.approx(called.nats, rel=1e-5)


def test_equal_to_transformers(folder, lm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([lm.tokenizer.encode(TEXT)])
    context_length, stride, done, total, count = 48, 16, 1, 0.0, 0
    for begin in range(0, ids.shape[1], stride):  # the loop of Hugging Face's guide, windows one token longer
        end = min(begin + context_length + 1, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : labels.shape[1] - (end - done)] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=labels).loss
        total, count, done = total + loss.item() * (end - done), count + end - done, end
        if end == ids.shape[1]:
            break
    found = evaluate_text(lm, read(TEXT), context_length=context_length, stride=stride)
    assert found.tokens == count and found.loss == pytest.approx(total / count, rel=1e-5)


def test_adding_losses():
    assert TextLoss(1.0, 2, 3, 4, 1) + TextLoss(0.5, 1, 1, 1, 1) == TextLoss(1.5, 3, 4, 5, 2)
    assert TextLoss(1.0, 1, 0, 0, 1).to_dict()["bits_per_byte"] is None
    assert TextLoss(2000.0, 1, 1, 1, 1).to_dict()["perplexity"] is None


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"context_length": 129}, "model.s context of 128"),
        ({"context_length": 0}, "context of 0"),
        ({"context_length": 9, "stride": 10}, "10"),
    ],
)
def test_invalid_windows(lm, window, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_text(lm, read(TEXT), **window)


def test_invalid_texts(lm, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match="a.jsonl, line 1 is a conversation"):
        evaluate_text(lm, read_documents([tmp_path / "a.jsonl"]))
    with pytest.raises(DataError, match="no token to predict"):
        evaluate_text(lm, iter(()))

    class Broken:
        def __call__(self, tokens, cache=None):
            return lm.model(tokens) * mx.nan

    with pytest.raises(CheckpointError, match="not a number"):
        evaluate_text(replace(lm, model=Broken()), read(TEXT))


def test_default_window(lm):
    assert evaluate_text(lm, read(TEXT)) == evaluate_text(lm, read(TEXT), context_length=128, stride=64)
    assert np.isfinite(evaluate_text(lm, read("a")).loss)


def test_bytes_with_context_dependent_tokens(lm):
    runtime = tokenizers.Tokenizer(tokenizers.models.Unigram([("?", -9.0), ("▁one", -1.0), ("▁für", -1.0)], 0))
    runtime.pre_tokenizer, runtime.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(runtime, {})
    assert not tokenizer.has_byte_tokens
    text = "one für one für"
    for count, predicted in ((4, " für one für"), (2, " für"), (1, "")):
        ids, size = first_tokens(tokenizer, read(text), count)
        assert (ids, size) == ([tokenizer.encode(text)[:count]], len(predicted.encode()))
    scored = score(replace(lm, tokenizer=tokenizer), text)
    assert -scored.total / math.log(2) / scored.bits_per_byte == pytest.approx(len(" für one für".encode()))
