"""Configurations from metadata."""

from __future__ import annotations

import struct

import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of
from tests.checkpoint.gguf.raw_gguf import array, small_llama


def test_small_llama_opens(tmp_path):
    assert open_checkpoint(small_llama(tmp_path, {})).config.hidden_size == 4
    same_for_all = {"llama.attention.head_count_kv": array(4, 1, struct.pack("<I", 2))}
    assert open_checkpoint(small_llama(tmp_path, same_for_all)).config.num_key_value_heads == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"general.architecture": "mamba"}, "'mamba'.*one of llama, qwen2"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.block_count": 2**32 - 1}, "block_count"),
        ({"llama.block_count": 2**30}, "block_count is 1073741824, there are 11 tensors"),
        ({"llama.block_count": 2}, "layers.1 is missing"),
        ({"llama.block_count": "many"}, "block_count must be a whole number"),
        ({"llama.embedding_length": 5}, "embedding_length is 5"),
        ({"llama.feed_forward_length": 7}, "config"),
        ({"llama.attention.head_count": 0}, "head_count 0"),
        ({"llama.attention.head_count": 3}, "head_dim 1 is odd"),
        ({"llama.attention.head_count_kv": array(4, 2, struct.pack("<II", 1, 2))}, "differs between the layers"),
        ({"llama.attention.head_count_kv": array(8, 1, bytes(8))}, "must be a whole number"),
        ({"llama.attention.value_length": 1}, "value_length differs"),
        ({"llama.rope.scaling.type": "su"}, "'su'"),
        ({"split.count": 3}, "split.count is 3, which doesn't match"),
        ({"split.count": "three"}, "split.count is not a number"),
    ],
)
def test_impossible_metadata_is_an_error(change, message, tmp_path):
    path = small_llama(tmp_path, dict(change))
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_missing_metadata_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks llama\.context_length"):
        open_checkpoint(small_llama(tmp_path, {}, remove={"llama.context_length"}))


def test_token_id_outside_the_vocabulary_is_an_error(tiny_tokenizer, tmp_path):
    model, path = random_model("qwen2", tiny_tokenizer), tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    key = b"bos_token_id" + struct.pack("<I", 4)
    path.write_bytes(path.read_bytes().replace(key + struct.pack("<I", 0), key + struct.pack("<I", 1 << 30), 1))
    with pytest.raises(ConfigError, match="m.gguf.*bos_token_id is 1073741824, it must be a token id below"):
        open_checkpoint(path)
