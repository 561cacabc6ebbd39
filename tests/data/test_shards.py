"""Loss masks of shards."""

import hashlib

import numpy as np
import pytest

from mlxlm.data import DataOptions, prepare
from tests.data.helpers import jsonl

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


def test_text_has_no_masks(byte_level, text, tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": text(9, i)} for i in range(30)])
    manifest = prepare(DataOptions([tmp_path / "a.jsonl"]), byte_level, tmp_path / "out", shard_tokens=50)
    assert all(shard.mask_sha256 is None for shard in manifest.train.shards)
    assert not list((tmp_path / "out").glob("*.mask.bin"))


def test_manifest_has_digests_of_masks(byte_level, tmp_path):
    manifest = prepare(
        DataOptions([jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}] * 30)]),
        byte_level,
        tmp_path / "out",
        shard_tokens=64,
    )
    for shard in manifest.train.shards:
        content = (tmp_path / "out" / shard.mask_file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.mask_sha256 and len(content) == shard.tokens
