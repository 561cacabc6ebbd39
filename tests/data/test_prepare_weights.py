"""Sources with weights, as parts of the prepared folder; masks of conversations."""

import hashlib
import json

import numpy as np
import pytest

from mlxlm.data import DataOptions, TokenDataset, parse_weighted_sources, prepare
from mlxlm.data.manifest import Manifest
from mlxlm.utils.errors import DataError
from tests.data.helpers import jsonl
from tests.run_command import run_command


def test_parts_have_shards_of_their_own(byte_level, text, tmp_path):
    (tmp_path / "a.txt").write_text(text(3000), encoding="utf-8")
    jsonl(tmp_path / "b.jsonl", [{"text": f"{i} {text(30, i)}"} for i in range(60)])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text(text(900, 5), encoding="utf-8")
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "sub" / "a.txt"]
    manifest = prepare(DataOptions(paths, weights=[2, 1, 1]), byte_level, tmp_path / "out", shard_tokens=1000)
    assert [(p.name, p.weight) for p in manifest.parts] == [("a.txt", 0.5), ("b.jsonl", 0.25), ("a.txt (2)", 0.25)]
    assert manifest.validation_split == "mixed"  # two are few documents, one is many
    names = [shard.file for part in manifest.parts for shard in part.train.shards]
    assert names == [f"train-{i:05d}.bin" for i in range(len(names))] and len(names) > 6
    data = TokenDataset.open(tmp_path / "out", "train")
    assert Manifest.read(tmp_path / "out") == manifest == data.manifest
    first = 0
    for path, part in zip(paths, manifest.parts, strict=True):
        alone = prepare(DataOptions([path]), byte_level, tmp_path / f"alone{first}", shard_tokens=1000)
        assert part.train.shards[-1].tokens < 1000
        assert [s.sha256 for s in part.train.shards] == [s.sha256 for s in alone.train.shards]
        assert (part.train.tokens, part.train.documents) == (alone.train.tokens, alone.train.documents)
        first += part.train.tokens
    assert first == len(data) == manifest.train.tokens
    assert manifest.validation.documents == 1 + 3 + 1


def test_given_validation_and_weights(byte_level, tmp_path):
    for name in ("a", "b", "v"):
        (tmp_path / f"{name}.txt").write_text(f"river {name}")
    paths, held = [tmp_path / "a.txt", tmp_path / "b.txt"], [tmp_path / "v.txt"]
    manifest = prepare(DataOptions(paths, weights=[1, 3], validation=held), byte_level, tmp_path / "out")
    assert manifest.validation_split == "files" and manifest.validation.documents == 1
    assert [part.train.documents for part in manifest.parts] == [1, 1]
    empty = jsonl(tmp_path / "c.jsonl", [{"text": ""}])
    with pytest.raises(DataError, match="no text in the sources"):
        prepare(DataOptions([*paths, empty], weights=[1, 1, 1]), byte_level, tmp_path / "other")


def test_weights_can_be_changed_in_the_manifest(byte_level, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"river {name}")
    prepare(DataOptions([tmp_path / "a.txt", tmp_path / "b.txt"], weights=[1, 1]), byte_level, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    content = json.loads(path.read_text())
    content["parts"][0]["weight"] = 1.5
    path.write_text(json.dumps(content))
    assert [part.weight for part in Manifest.read(tmp_path / "out").parts] == [0.75, 0.25]


def test_the_commands(byte_level, text, tmp_path):
    from click.testing import CliRunner

    from mlxlm.cli.prepare import prepare as command

    byte_level.save(tmp_path / "tokenizer")
    rows = [{"story": f"{i} {text(40, i)}"} for i in range(30)]
    jsonl(tmp_path / "a.jsonl", [*rows, *rows[:6]])
    jsonl(tmp_path / "b.jsonl", [{"story": text(60, 77)}])
    (tmp_path / "v.jsonl").write_text('{"story": "river"}')
    arguments = [f"{tmp_path}/a.jsonl=3", f"{tmp_path}/b.jsonl=1", "--text-column", "story", "--dedup", "0.9",
                 "--validation", str(tmp_path / "v.jsonl")]  # fmt: skip
    where = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(command, [*arguments, *where], catch_exceptions=False)
    assert done.exit_code == 0
    assert "train: a.jsonl, 75.0%" in done.stdout
    assert "dropped 6 exact and 0 near duplicates of 38 documents (15.8%" in done.stderr
    manifest = Manifest.read(tmp_path / "out")
    assert [part.name for part in manifest.parts] == ["a.jsonl", "b.jsonl"] and manifest.validation_split == "files"
    assert CliRunner().invoke(command, [*arguments[:4], "--dedup", "0", *where]).exit_code == 2


CHAT = [
    {"role": "system", "content": "stone"},
    {"role": "user", "content": "river?\n"},
    {"role": "assistant", "content": "water 東京"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": ""},
]


def expected_mask(tokenizer, messages):
    mask = [0]  # BOS
    for message in messages:
        words = len(tokenizer.encode(message["content"], add_special_tokens=False))
        answer = int(message["role"] == "assistant")
        mask += [0, *[answer] * words, answer]
    return [*mask, 0]  # EOS


@pytest.mark.parametrize("shard_tokens", [7, 50, 10_000])
@pytest.mark.parametrize("documents", [3, 40])
def test_assistant_messages_are_training_targets(byte_level, text, tmp_path, shard_tokens, documents):
    """And every token of a plain text; conversations and texts come in any order, over any border of shards."""
    rows = [{"messages": CHAT} if i % 3 else {"text": text(9, i)} for i in range(documents)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    manifest = prepare(
        DataOptions([path], validation_fraction=0.3), byte_level, tmp_path / "out", shard_tokens=shard_tokens
    )
    found, ids = [], []
    for split in ("train", "validation"):
        for shard in getattr(manifest, split).shards:
            tokens = np.fromfile(tmp_path / "out" / shard.file, "<u2")
            mask = np.ones(len(tokens), np.uint8)
            if shard.mask_sha256 is not None:
                mask = np.fromfile(tmp_path / "out" / shard.mask_file, np.uint8)
                assert hashlib.sha256(mask).hexdigest() == shard.mask_sha256
            else:
                assert not (tmp_path / "out" / shard.mask_file).exists()
            assert len(mask) == len(tokens)
            ids += tokens.tolist()
            found += mask.tolist()
    whole, at, seen = expected_mask(byte_level, CHAT), 0, 0
    system = byte_level.special_tokens["<|system|>"]
    while at < len(ids):
        assert ids[at] == byte_level.bos_token_id
        end = ids.index(byte_level.eos_token_id, at) + 1
        expected = whole if ids[at + 1] == system else [1] * (end - at)
        assert found[at:end] == expected
        seen += expected is whole
        at = end
    assert seen == sum("messages" in row for row in rows)


def test_prepare_from_stdin(byte_level, text, tmp_path):
    byte_level.save(tmp_path / "tokenizer")
    arguments = ("prepare", "-", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "out")
    data = text(3000).encode("utf-8")
    done = run_command(*arguments, "--json", stdin=data)
    assert (done.returncode, done.stderr) == (0, b"")
    manifest = json.loads(done.stdout)
    assert manifest["train"]["bytes"] + manifest["validation"]["bytes"] == len(data)
    assert len(TokenDataset.open(tmp_path / "out", "train")) == manifest["train"]["tokens"]
    again = run_command(*arguments, stdin=data)
    assert again.returncode == 1
    assert again.stderr.startswith(b"error: ") and again.stderr.count(b"\n") == 1


def test_bad_input_stops_or_is_skipped(byte_level, text, tmp_path):
    """In all commands that read text into a file; the count is on stderr."""
    byte_level.save(tmp_path / "tokenizer")
    lines = text(3000).encode().splitlines(keepends=True)
    (tmp_path / "a.txt").write_bytes(b"".join([*lines[:4], b"bad \xff line\n", *lines[4:]]))
    commands = (
        ("prepare", tmp_path / "a.txt", "--tokenizer", tmp_path / "tokenizer"),
        ("tokenizer", "train", tmp_path / "a.txt", "--vocab-size", "270"),
    )
    for number, command in enumerate(commands):
        done = run_command(*command, "--out", tmp_path / f"out {number}")
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1
        assert b"a.txt is not UTF-8 text: 0xFF at byte" in done.stderr and b", in line 5 (try: " in done.stderr
        assert b"--on-bad-input skip" in done.stderr
        done = run_command(*command, "--out", tmp_path / f"out {number}", "--on-bad-input", "skip")
        assert done.returncode == 0 and b"skipped 1 bad line or row of the input:\n  1 like this" in done.stderr
    manifest = TokenDataset.open(tmp_path / "out 0", "train").manifest
    assert manifest.skipped == 1 and [reason.count for reason in manifest.skip_reasons] == [1]


@pytest.mark.parametrize("options, message", [
    *(({"validation_fraction": fraction}, "validation_fraction is") for fraction in (-0.1, 1, 2, 1e-300)),
    *(({"dedup": threshold}, "dedup is") for threshold in (0, -0.1, 1.01, float("nan"))),
    ({"on_bad_input": "ignore"}, "on_bad_input is 'ignore', it must be one of stop, skip"),
    ({"weights": [1]}, "2 sources have 1 weights"),
    ({"weights": [1, 0]}, "a weight is 0"),
])  # fmt: skip
def test_values_that_cannot_work(options, message):
    with pytest.raises(DataError, match=message):
        DataOptions(["a.txt", "b.txt"], **options)


def test_weights_are_normalized_and_names_unique():
    data = DataOptions(["x/a.txt", "y/a.txt", "-"], weights=[2, 1, 1])
    assert data.weights == [0.5, 0.25, 0.25]
    assert data.source_names() == ["a.txt", "a.txt (2)", "stdin"]


def test_weights_below_a_thousandth_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"smallest share is 0\.001"):
        parse_weighted_sources(["a.txt=1e-9", "b.txt=1"])


def test_weights_follow_paths(tmp_path):
    odd = tmp_path / "a=0.5"
    odd.write_text("x")
    assert parse_weighted_sources([str(odd), "b.txt"]) == ([str(odd), "b.txt"], None)
    assert parse_weighted_sources([f"{odd}=3", "b=c.txt=1"]) == ([str(odd), "b=c.txt"], [0.75, 0.25])
    assert parse_weighted_sources(["a=b", "-"]) == (["a=b", "-"], None)
    assert parse_weighted_sources(["-=1e0", "x=7"]) == (["-", "x"], [0.125, 0.875])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["a=1", "b"], "b has no weight"),
        (["a=0", "b=1"], "a weight is 0.0"),
        (["a=-1"], "a weight is -1.0"),
        (["a=nan"], "a weight is nan"),
        (["a=inf", "b=1"], "a weight is inf"),
    ],
)
def test_invalid_weights(sources, message):
    with pytest.raises(DataError, match=f"{message}.*try: wiki.txt=0.7"):
        parse_weighted_sources(sources)
