import hashlib
import io
import itertools
import json
import os
import threading
import tracemalloc

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.data import CHAT_TEMPLATE, DataOptions, Manifest, TokenDataset, prepare
from mlxlm.data.preparation import ValidationSplit, training_texts
from mlxlm.data.text import Document
from mlxlm.tokenizer import Tokenizer, load
from mlxlm.utils.errors import DataError
from tests.data.helpers import jsonl
from tests.paths import SHARED


def tokens(folder, split):
    data = TokenDataset.open(folder, split)
    return data.slice(0, len(data)).tolist()


def whole(tokenizer, text):
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*bos, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def test_blocks_of_one_long_text_are_held_out(tokenizer, text, tmp_path):
    content = text(30_000)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    options = DataOptions([tmp_path / "a.txt"], validation_fraction=0.1)
    manifest = prepare(options, tokenizer, tmp_path / "out")
    assert manifest.validation_split == "blocks"
    assert manifest.validation.bytes == pytest.approx(0.1 * len(content.encode()), rel=0.05)
    train, validation = documents_of(tmp_path / "out", "train"), documents_of(tmp_path / "out", "validation")
    assert len(validation) == min(32, manifest.validation.bytes // 4000)
    assert sum(map(len, train)) == manifest.train.tokens and sum(map(len, validation)) == manifest.validation.tokens
    # Together they are the whole text, and the blocks are spread over it.
    parts = [part for pair in itertools.zip_longest(train, validation, fillvalue=[]) for part in pair]
    assert tokenizer.decode(sum(parts, [])) == content
    places = [start / sum(map(len, parts)) for start in itertools.accumulate(map(len, parts))][::2]
    for quarter in range(4):
        assert any(quarter / 4 <= place < (quarter + 1) / 4 for place in places)
    assert all(tokenizer.decode(part).endswith("\n") for part in parts[:-2])
    again = prepare(options, tokenizer, tmp_path / "again", seed=1)
    assert again.validation.shards[0].sha256 != manifest.validation.shards[0].sha256


def test_tiny_texts_still_give_both_splits(byte_level, tmp_path):
    (tmp_path / "a.txt").write_text("river")
    manifest = prepare(DataOptions([tmp_path / "a.txt"]), byte_level, tmp_path / "out")
    parts = [tokens(tmp_path / "out", name) for name in ("train", "validation")]
    assert [byte_level.decode(part) for part in parts] == ["rivr", "e"]
    assert parts[0][0] == byte_level.bos_token_id and parts[0][-1] == byte_level.eos_token_id
    assert (manifest.train.bytes, manifest.validation.bytes) == (4, 1)


@given(
    st.lists(st.text(st.sampled_from("a漢\n "), max_size=60), min_size=1, max_size=8),
    st.floats(0.01, 0.9), st.integers(0, 99), st.integers(1, 40),
)  # fmt: skip
def test_blocks_of_any_documents(texts, fraction, seed, piece_chars):
    """Nothing is lost or doubled, each document begins and ends once, and about `fraction` is held out."""

    def documents():
        for text in texts:
            yield Document("", (text[i : i + piece_chars] for i in range(0, len(text), piece_chars)))

    held_out, bos, eos, joined = 0, 0, 0, ""
    for is_held_out, document in ValidationSplit(documents(), fraction, seed)(documents()):
        part = "".join(document.pieces)
        joined, bos, eos = joined + part, bos + document.add_bos, eos + document.add_eos
        held_out += is_held_out * len(part.encode())
    assert (joined, bos, eos) == ("".join(texts), len(texts), len(texts))
    longest = max((len(line.encode()) + 1 for line in joined.split("\n")), default=0)
    assert abs(held_out - max(1, round(fraction * len(joined.encode())))) <= max(longest, 4)


def test_few_conversations_are_not_cut():
    documents = [Document("", iter(()), [{"role": "user", "content": f"{i}" * 10, "weight": 1}]) for i in range(6)]
    split = ValidationSplit((document for document in documents), 0.3, 0)
    assert [held_out for held_out, _ in split(documents)] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("fraction", [0.05, 0.3])
def test_many_documents_are_split_whole(byte_level, text, tmp_path, fraction):
    contents = [f"{i} {text(20, i)}" for i in range(200)]
    path = jsonl(tmp_path / "a.jsonl", [{"text": content} for content in contents])
    manifest = prepare(DataOptions([path], validation_fraction=fraction), byte_level, tmp_path / "out")
    assert manifest.validation_split == "documents"
    assert manifest.validation.documents == pytest.approx(200 * fraction, abs=1)
    assert manifest.train.documents + manifest.validation.documents == 200
    found = {}
    for split in ("train", "validation"):
        found[split] = documents_of(tmp_path / "out", split)
        decoded = [byte_level.decode(ids) for ids in found[split]]
        assert getattr(manifest, split).bytes == sum(len(d.encode()) for d in decoded)
        assert decoded == [c for c in contents if c in set(decoded)]
    assert sorted(found["train"] + found["validation"]) == sorted(whole(byte_level, c) for c in contents)
    again = prepare(DataOptions([path], validation_fraction=fraction), byte_level, tmp_path / "again")
    assert again == manifest
    other = prepare(DataOptions([path], validation_fraction=fraction), byte_level, tmp_path / "other", seed=1)
    assert other.validation.shards[0].sha256 != manifest.validation.shards[0].sha256


def documents_of(folder, split):
    """Documents of a split, cut by its index files."""
    starts, offset = [], 0
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in (manifest["parts"][0]["train"] if split == "train" else manifest[split])["shards"]:
        index = np.load(folder / shard["file"].replace(".bin", ".idx.npy"))
        assert index.dtype == np.int64
        starts += (index + offset).tolist()
        offset += shard["tokens"]
    ids = tokens(folder, split)
    return [ids[a:b] for a, b in itertools.pairwise([*starts, len(ids)])]


@pytest.mark.parametrize("n", [19, 20, 21, 40])
def test_no_split_is_empty_by_bad_luck(byte_level, tmp_path, n):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"river {i}"} for i in range(n)])
    for seed in range(5):
        manifest = prepare(DataOptions([path]), byte_level, tmp_path / f"out{seed}", seed=seed)
        assert manifest.validation_split == ("blocks" if n < 20 else "documents")
        assert manifest.validation.documents >= 1


@pytest.mark.parametrize("texts", [200, 3, 1])
@pytest.mark.parametrize("weights", [None, [1, 1]])
def test_training_texts_are_the_training_split(byte_level, text, tmp_path, texts, weights):
    """To the byte: of many documents, of few, and of a single one, of which blocks are held out."""
    paths = [
        jsonl(
            tmp_path / f"{name}.jsonl",
            [{"text": f"{name}{i} {text(50 if texts > 20 else 800, i)}"} for i in range(texts)],
        )
        for name in "ab"
    ]
    options = DataOptions(paths, weights=weights, validation_fraction=0.1)
    manifest = prepare(options, byte_level, tmp_path / "out", seed=3)
    assert manifest.validation_split == ("documents" if texts > 20 else "blocks") and manifest.validation.documents
    seen = "".join(training_texts(options, seed=3))
    assert seen == byte_level.decode(tokens(tmp_path / "out", "train"))
    assert len(seen.encode()) == manifest.train.bytes
    assert manifest.validation.bytes == pytest.approx(0.1 * (manifest.train.bytes + manifest.validation.bytes), rel=0.3)
    held = [tmp_path / "held.txt"]
    held[0].write_text("stone")
    all_text = "".join(training_texts(DataOptions(paths, weights=weights, validation=held)))
    assert len(all_text.encode()) == manifest.train.bytes + manifest.validation.bytes


def test_a_pipe_is_read_once(byte_level, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("river\n" * 1000,))
    writer.start()
    manifest = prepare(DataOptions([tmp_path / "pipe"]), byte_level, tmp_path / "out")
    writer.join()
    assert manifest.train.bytes + manifest.validation.bytes == 6000 and manifest.validation.bytes >= 300
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("tmp")]


def test_bad_input_is_skipped_and_counted(byte_level, tmp_path):
    good = [{"text": f"river {i}"} for i in range(30)]
    path = jsonl(tmp_path / "a.jsonl", good)
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [b'{"text": \n', b'{"text": "\xff"}\n', b'{"messages": [{"role": "robot", "content": "a"}]}\n', b"[]\n"]
    path.write_bytes(b"".join([*lines[:7], *bad, *lines[7:]]))
    with pytest.raises(DataError, match="a.jsonl, line 8 is not valid JSON.* or `on_bad_input=skip`"):
        prepare(DataOptions([path]), byte_level, tmp_path / "out")
    manifest = prepare(DataOptions([path], on_bad_input="skip"), byte_level, tmp_path / "out")
    assert manifest.skipped == 4 and Manifest.read(tmp_path / "out") == manifest
    clean = prepare(DataOptions([jsonl(tmp_path / "a.jsonl", good)]), byte_level, tmp_path / "clean")
    assert clean.skipped == 0 and clean.train == manifest.train and clean.validation == manifest.validation
    path.write_bytes(b"".join(bad))
    with pytest.raises(DataError, match="no text in the sources: all 4 lines were skipped as bad input"):
        prepare(DataOptions([path], on_bad_input="skip"), byte_level, tmp_path / "nothing")


def test_given_validation(byte_level, tmp_path):
    (tmp_path / "a.txt").write_text("river")
    (tmp_path / "b.txt").write_text("stone")
    manifest = prepare(DataOptions([tmp_path / "a.txt"], validation=[tmp_path / "b.txt"]), byte_level, tmp_path / "out")
    assert manifest.validation_split == "files" and manifest.sources == ["a.txt", "b.txt"]
    assert tokens(tmp_path / "out", "train") == whole(byte_level, "river")
    assert tokens(tmp_path / "out", "validation") == whole(byte_level, "stone")


CONVERSATIONS = [
    [{"role": "user", "content": "river?\n"}, {"role": "assistant", "content": " water 東京 "}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "the"}],
]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe"])
def test_conversations_are_what_the_chat_template_renders(kind, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    path = jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    manifest = prepare(DataOptions([path], validation_fraction=0), tokenizer, tmp_path / "out")
    assert manifest.num_conversations == 2 and manifest.validation.tokens == 0
    assert manifest.train.bytes == sum(len(m["content"].encode()) for c in CONVERSATIONS for m in c)
    expected = []
    for messages in CONVERSATIONS:
        template = jinja2.Environment().from_string(CHAT_TEMPLATE)
        text = template.render(messages=messages, bos_token=tokenizer.special_token_names["bos"])
        expected += tokenizer.encode(text, add_special_tokens=False, parse_special=True) + [tokenizer.eos_token_id]
    assert tokens(tmp_path / "out", "train") == expected


def test_contents_cannot_forge_special_tokens(byte_level, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "<|end|><|system|>"}]}, {"text": "<|end_of_text|>"}]
    prepare(DataOptions([jsonl(tmp_path / "a.jsonl", rows)], validation_fraction=0), byte_level, tmp_path / "out")
    ids = tokens(tmp_path / "out", "train")
    special = byte_level.special_tokens
    assert [ids.count(special[name]) for name in ("<|end|>", "<|system|>", "<|end_of_text|>")] == [1, 0, 2]


@pytest.mark.parametrize("role", ["tool", "end", "pad", "User"])
def test_unknown_roles(byte_level, tmp_path, role):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": role, "content": ""}]}])
    with pytest.raises(DataError, match=f"a.jsonl, line 1: role '{role}' is not known"):
        prepare(DataOptions([path]), byte_level, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_tools_need_fine_tuning(byte_level, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS[0], "tools": [{}]}])
    with pytest.raises(DataError, match="a.jsonl, line 1 has tools or tool calls.*try: mlxlm finetune"):
        prepare(DataOptions([path]), byte_level, tmp_path / "out")


def test_conversations_need_role_tokens(llama2, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS[0]}])
    with pytest.raises(DataError, match="line 1 is a conversation, but the tokenizer has no <|"):
        prepare(DataOptions([path]), llama2, tmp_path / "out")


def test_files_on_disk(byte_level, text, tmp_path):
    content = text(5000)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    manifest = prepare(DataOptions([tmp_path / "a.txt"]), byte_level, tmp_path / "out", shard_tokens=1000)
    assert manifest.dtype == "uint16"
    assert [s.tokens for s in manifest.train.shards[:-1]] == [1000] * (len(manifest.train.shards) - 1)
    names = {"manifest.json", "tokenizer"}
    for split in (manifest.train, manifest.validation):
        for shard in split.shards:
            names |= {shard.file, shard.index_file}
            data = (tmp_path / "out" / shard.file).read_bytes()
            assert hashlib.sha256(data).hexdigest() == shard.sha256
            assert len(data) == 2 * shard.tokens
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    ids = np.concatenate([np.fromfile(tmp_path / "out" / s.file, "<u2") for s in manifest.train.shards])
    assert ids.tolist() == tokens(tmp_path / "out", "train")


def test_large_vocabularies_take_four_bytes(byte_level, tmp_path):
    tokenizer = load_with_extra_token(byte_level, tmp_path)
    (tmp_path / "a.txt").write_text("river")
    manifest = prepare(DataOptions([tmp_path / "a.txt"], validation_fraction=0), tokenizer, tmp_path / "out")
    assert manifest.dtype == "uint32"
    assert tokens(tmp_path / "out", "train") == whole(tokenizer, "river")


def load_with_extra_token(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "large")
    path = tmp_path / "large" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["vocab"]["☃"] = 70_000
    path.write_text(json.dumps(content))
    return load(tmp_path / "large")


def test_an_output_in_use_is_left_alone(byte_level, tmp_path):
    (tmp_path / "a.txt").write_text("river")
    (tmp_path / "out").mkdir()
    prepare(DataOptions([tmp_path / "a.txt"]), byte_level, tmp_path / "out")  # empty: fine
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    with pytest.raises(DataError, match="already exists .*another name"):
        prepare(DataOptions([tmp_path / "a.txt"]), byte_level, tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    with pytest.raises(DataError, match="already exists"):
        prepare(DataOptions([tmp_path / "a.txt"]), byte_level, tmp_path / "a.txt")


def test_a_failure_leaves_nothing_behind(byte_level, text, tmp_path):
    (tmp_path / "a.txt").write_text(text(20_000), encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"binary\0")
    with pytest.raises(DataError, match="b.txt is not UTF-8"):
        prepare(DataOptions([tmp_path / "a.txt", tmp_path / "b.txt"]), byte_level, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


def test_rows_without_any_text(byte_level, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": ""}])
    for options in ({}, {"validation_fraction": 0}):
        with pytest.raises(DataError, match="no text in the sources"):
            prepare(DataOptions([path], **options), byte_level, tmp_path / "out")


def test_memory_is_bounded(byte_level, text, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.data.tokenize.BATCH_CHARS", 1 << 13)
    monkeypatch.setattr("mlxlm.data.text.PIECE_CHARS", 1 << 11)
    block = text(2000).encode("utf-8")

    class Endless(io.RawIOBase):
        left = 1_200_000 // len(block)

        def read(self, size=-1):
            self.left -= 1
            return block if self.left >= 0 else b""

    seen = []
    tracemalloc.start()
    try:
        data = DataOptions(["-"], stdin=Endless())
        manifest = prepare(data, byte_level, tmp_path / "out", shard_tokens=1 << 16, progress=seen.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest.train.bytes + manifest.validation.bytes == sum(seen) > 1_150_000 and manifest.sources == ["stdin"]
    assert peak < 1_150_000


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_pieces_do_not_change_token_ids(name, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.data.text.PIECE_CHARS", 1 << 12)
    folder = SHARED
    if not folder.is_dir():
        pytest.skip("no folder of real texts and tokenizers beside this checkout")
    real = load(folder / "tokenizers" / name)
    content = (folder / "data" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:30_000]
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    prepare(DataOptions([tmp_path / "a.txt"], validation_fraction=0), real, tmp_path / "out")
    data = TokenDataset.open(tmp_path / "out", "train")
    bos = [] if real.bos_token_id == real.eos_token_id else [real.bos_token_id]
    expected = [*bos, *real.encode(content, add_special_tokens=False), real.eos_token_id]
    assert data.slice(0, len(data)).tolist() == expected


def test_tokenizer_without_bos_and_eos_is_refused(byte_level, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    mute = Tokenizer(byte_level._runtime, {})
    with pytest.raises(DataError, match="neither a BOS nor an EOS token"):
        prepare(DataOptions([tmp_path / "a.txt"]), mute, tmp_path / "out")
