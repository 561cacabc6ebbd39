"""What must come along with weights: tokenizer and configuration, in each format."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert.metadata import check_metadata
from mlxlm.tokenizer import Tokenizer, train
from mlxlm.utils.errors import CheckpointError, TokenizerError
from tests.small_models import in_memory, random_decoder


@pytest.fixture
def source(tiny_config, tiny_tokenizer):
    ids = {"bos_token_id": tiny_tokenizer.bos_token_id, "eos_token_id": tiny_tokenizer.eos_token_id}
    return with_tokenizer(in_memory(random_decoder(tiny_config.with_changes(**ids))), tiny_tokenizer)


def with_config(source: Checkpoint, format="safetensors", **changes) -> Checkpoint:
    return replace(source, format=format, config=source.config.with_changes(**changes))


def with_tokenizer(source: Checkpoint, tokenizer: Tokenizer, format="safetensors") -> Checkpoint:
    return replace(source, format=format, load_tokenizer=lambda: tokenizer)


def changed(tokenizer: Tokenizer, template=None, **names) -> Tokenizer:
    import tokenizers

    runtime = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    return Tokenizer(runtime, {**tokenizer.special_token_names, **names}, chat_template=template)


def test_the_same(source):
    assert [(check.name, check.result) for check in check_metadata(source, source, "out")] == [
        ("tokenizer", "equal"), ("configuration", "equal"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 64}, {"rope_theta": 9000.0}, {"sliding_window": 16}, {"rms_norm_eps": 1e-6},
        {"eos_token_id": 5}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"embedding_multiplier": 2.0},
    ],
)  # fmt: skip
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
def test_a_field_that_was_lost_is_named(source, changes, format):
    with pytest.raises(CheckpointError, match=f"out: the configuration's {next(iter(changes))} is .* in here"):
        check_metadata(source, with_config(source, format, **changes), "out")


def test_the_positions_of_every_layer_are_compared(source):
    fields = {
        "sliding_window": 16, "layer_types": ("sliding_attention", "full_attention"), "rope_local_base_freq": 500.0,
    }  # fmt: skip
    before = with_config(source, **fields)
    with pytest.raises(CheckpointError, match="out: the configuration's rope_theta is 9000"):
        check_metadata(before, with_config(source, **fields, rope_theta=9000.0), "out")


def test_fields_that_mean_the_same_may_differ(source):
    windows = {"sliding_window": 16, "layer_types": ("sliding_attention",) * 2}
    pairs = (
        (windows, {"sliding_window": 16}),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 9.9999997e-6}),
        ({"rope_theta": 1e6 / 3}, {"rope_theta": 333333.34}),
        ({"attention_out_bias": False}, {}),
        ({"pad_token_id": None}, {}),
    )
    for before, after in pairs:
        a, b = with_config(source, **before), with_config(source, **after)
        assert check_metadata(a, b, "out")[1].result == "equal", before


def test_what_a_format_has_no_place_for_is_named(source):
    other = with_config(source, model_type="mistral")
    _, check = check_metadata(other, with_config(source, "gguf"), "out")
    assert check.result == "in part" and "model_type ('mistral' becomes 'llama')" in check.detail
    with pytest.raises(CheckpointError, match="model_type"):
        check_metadata(other, source, "out")


def test_another_tokenizer_is_found(source, tiny_tokenizer, make_text):
    other = train([make_text(3000).upper()], 300)
    with pytest.raises(CheckpointError, match="out: its tokenizer differs from the source's: other tokens at "):
        check_metadata(source, with_tokenizer(source, other), "out")
    end = with_tokenizer(source, changed(tiny_tokenizer, eos=tiny_tokenizer.special_token_names["pad"]))
    with pytest.raises(CheckpointError, match="the eos token is "):
        check_metadata(source, end, "out")

    def broken():
        raise TokenizerError("m.gguf: no merges")

    with pytest.raises(CheckpointError, match="out: its tokenizer can't be read: m.gguf: no merges"):
        check_metadata(source, replace(source, load_tokenizer=broken), "out")
    [check, _] = check_metadata(replace(source, load_tokenizer=broken), source, "out")
    assert check.result == "skipped"


def test_the_chat_template_comes_along_where_the_format_has_a_place_for_it(source, tiny_tokenizer):
    a = with_tokenizer(source, changed(tiny_tokenizer, "{{ messages }}"))
    [check, _] = check_metadata(a, a, "out")
    assert "equal chat template" in check.detail
    with pytest.raises(CheckpointError, match="chat template differs"):
        check_metadata(a, with_tokenizer(source, tiny_tokenizer, "gguf"), "out")
    [check, _] = check_metadata(a, with_tokenizer(source, tiny_tokenizer, "llama2.c"), "out")
    assert check.result == "in part" and "chat template" in check.detail


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("tokenizer.ggml.pre", "smollm", "other tokens at"),
        ("tokenizer.ggml.eos_token_id", 5, "the eos token is 5"),
        ("llama.context_length", 64, "max_position_embeddings is 64"),
    ],
)
def test_wrong_values_in_a_gguf_file_are_found(source, tmp_path, monkeypatch, key, value, error):
    write_header = gguf.writer.write_header

    def wrong(file, architecture, metadata, tensors, types):
        assert key in metadata
        write_header(file, architecture, {**metadata, key: value}, tensors, types)

    monkeypatch.setattr(gguf.writer, "write_header", wrong)
    tokenizer = train(["In the year 1911 there were 1234 of 1234, in 1912 there were 1911. " * 40], 280)
    source = with_tokenizer(source, tokenizer)
    gguf.write(tmp_path / "m.gguf", source.config, source.tensors, tokenizer, "F32")
    with pytest.raises(CheckpointError, match=error):
        check_metadata(source, open_checkpoint(tmp_path / "m.gguf"), "out")
