"""Vocabulary sizes: nested tokenizers, their compression, and what a model learns in the same time."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import DataOptions
from mlxlm.data.preparation import training_texts
from mlxlm.families import load_preset
from mlxlm.plan import custom_machine, plan
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, effective_amount
from mlxlm.plan.vocabulary import Compression, compare_vocabularies, measure_compression
from mlxlm.tokenizer import tokenizer_stats, train, truncate
from mlxlm.utils.errors import DataError, TokenizerError
from tests.cli.helpers import error_line
from tests.run_command import run

SIZES = [263, 300, 310]
# Few letters, so that tokens of several lengths can be merged in more than one way: aa+a, a+aa.
WORDS = st.lists(st.text("aab é\n", min_size=1, max_size=12), min_size=20, max_size=60)


@settings(max_examples=40, deadline=None)
@given(texts=WORDS, data=st.data())
def test_a_smaller_vocabulary_is_the_beginning_of_a_larger_one(texts, data):
    largest = train([*texts, "a"], 320, exact=False)
    size = data.draw(st.integers(263, largest.vocab_size))
    assert truncate(largest, size).fingerprint == train([*texts, "a"], size).fingerprint


def test_a_vocabulary_needs_all_bytes(tiny_tokenizer):
    with pytest.raises(TokenizerError, match=r"too small: .* need 263"):
        truncate(tiny_tokenizer, 262)


@pytest.fixture
def text_file(tmp_path, make_text):
    path = tmp_path / "text.txt"
    path.write_text(make_text(6000))
    return path


def test_compression_is_that_of_tokenizers_of_their_own_on_held_out_text(tmp_path, make_text):
    text = make_text(3000).splitlines()
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    data = DataOptions([tmp_path / "text.jsonl"], validation_fraction=0.1)
    trained_on, held_out = list(training_texts(data)), list(training_texts(data, held_out=True))
    assert sorted([*trained_on, *held_out]) == sorted(text) and 0.08 < len(held_out) / len(text) < 0.12
    compression = measure_compression(data, [310, 300, 263, 300])
    expected = {size: tokenizer_stats(train(trained_on, size), held_out).bytes_per_token for size in SIZES}
    assert compression.bytes_per_token == expected and list(expected) == SIZES
    assert compression.train_bytes == sum(len(text.encode()) for text in trained_on)
    assert compression.bytes_per_token[263] == 1.0  # bytes alone


def test_sizes_that_the_text_does_not_support_are_left_out(text_file):
    compression = measure_compression(DataOptions([text_file]), [300, 32_768])
    assert list(compression.bytes_per_token) == [300] and 300 < compression.supported < 32_768
    with pytest.raises(TokenizerError, match=f"supports a vocabulary of {compression.supported} tokens"):
        measure_compression(DataOptions([text_file]), [32_768])


def compare(bytes_per_token, train_bytes, seconds):
    compression = Compression(bytes_per_token, train_bytes, 32_768)
    machine, config = custom_machine(1e12), load_preset("5m")
    plans = [plan(config.with_changes(vocab_size=size), machine=machine, mfu=0.5) for size in bytes_per_token]
    return plans, *compare_vocabularies(compression, plans, seconds)


def test_costs_follow_from_operations_and_compression():
    train_bytes, seconds = 10**9, 3600.0
    plans, sizes, best = compare({1024: 2.5, 4096: 3.25, 32_768: 4.0}, train_bytes, seconds)
    for row, planned in zip(sizes, plans, strict=True):
        flops = train_bytes / row.bytes_per_token * planned.flops.per_token
        assert row.flops_per_byte == pytest.approx(flops / train_bytes)
        assert row.seconds_per_epoch == pytest.approx(flops / 0.5e12)
        assert row.epochs == pytest.approx(seconds / row.seconds_per_epoch)
        assert row.parameters == planned.config.parameter_count()
    assert best.excess_bits == 0 == min(row.excess_bits for row in sizes) and best in sizes


@pytest.mark.parametrize("train_bytes", [10**12, 10**7])  # less than an epoch, and about ten
def test_expected_bits_are_those_of_the_scaling_law_for_the_text_that_fits_the_time(train_bytes):
    plans, sizes, _ = compare({1024: 2.5, 32_000: 4.456}, train_bytes, 3600.0)
    losses = []
    for row, planned in zip(sizes, plans, strict=True):
        tokens = 3600 * 0.5e12 / planned.flops.per_token * row.bytes_per_token / 4.456  # those of the law
        losses.append(CHINCHILLA_LAW.loss(planned.parameter_count, effective_amount(tokens, train_bytes / 4.456)))
    ratio = (1 + sizes[0].excess_bits) / (1 + sizes[1].excess_bits)
    assert ratio == pytest.approx(losses[0] / losses[1], rel=1e-4)


def test_more_compression_at_the_same_size_is_expected_to_be_better():
    assert all(row.excess_bits >= 0 for row in compare({1024: 2.5, 4096: 2.6}, 10**8, 60.0)[1])
    worse, better = (compare({1024: 2.5, 4096: x}, 10**8, 60.0)[1][1] for x in (2.6, 3.6))
    assert better.excess_bits < worse.excess_bits


def test_the_command(text_file, tmp_path):
    picture = tmp_path / "sizes.svg"
    arguments = "tokenizer", "report", text_file, "--sizes", "300,...,2k", "--preset", "0.3m", "--out", picture
    code, out, err = run(*arguments)
    lines = out.splitlines()
    assert (
        code == 0 and [line.split()[0] for line in lines[1:-1]] == ["300"] and lines[-1].startswith("Take 300 tokens")
    )
    assert "larger sizes are left out" in err and "--vocab-size 300 --out tokenizer" in err
    assert "recommended" in picture.read_text()
    assert "already exists" in error_line(*arguments)
    picture.unlink()
    code, out, _ = run(*arguments, "--json", "--minutes", "2", "--probe")
    values = json.loads(out)
    assert values["recommended"] == 300 and values["seconds"] == 120 and values["sizes"][0]["epochs"] > 0


@pytest.mark.parametrize(
    ("sizes", "parsed"), [("512,...,4k", [512, 1024, 2048, 4096]), ("512,…,3k,5k", [512, 1024, 2048, 3072, 5120])]
)
def test_sizes(sizes, parsed):
    from mlxlm.cli.tokenizer import _Sizes

    assert _Sizes().convert(sizes, None, None) == parsed


@pytest.mark.parametrize("sizes", ["", "...,2k", "512,two", "-4", "512,"])
def test_malformed_sizes_are_a_usage_error(sizes, text_file):
    code, _, err = run("tokenizer", "report", text_file, "--sizes", sizes)
    assert code == 2 and "512,...,32k" in err


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "text.txt is empty"),
        (b" \n", "there is no text to train a tokenizer on"),
        (b"hello\n", "supports a vocabulary of 263 tokens (try: smaller --sizes"),
        (b"\xff\xfe\x00" * 100, "UTF-8"),
    ],
)
def test_text_that_is_no_use_is_an_error(content, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(content)
    assert error in error_line("tokenizer", "report", "text.txt", "--sizes", "512,1k")
    assert not (tmp_path / "tokenizer-report.png").exists()


def test_a_pipe_can_be_read_only_once():
    with pytest.raises(DataError, match="read only once"):
        measure_compression(DataOptions(["-"]), [300])
