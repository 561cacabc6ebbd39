"""Tokenizer files: loading, saving, malformed content, agreement with transformers and mlx_lm."""

import base64
import json
import shutil

import pytest
import tokenizers

from mlxlm.tokenizer import load
from mlxlm.utils.errors import TokenizerError


@pytest.fixture
def saved(trained, tmp_path):
    trained.save(tmp_path / "saved")
    return tmp_path / "saved"


def change(path, **fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(content))


def test_save_and_load(trained, saved, sample):
    for path in (saved, saved / "tokenizer.json"):
        loaded = load(path)
        assert loaded.fingerprint == trained.fingerprint
        assert loaded.special_tokens == trained.special_tokens
        assert loaded.special_token_names == trained.special_token_names
        for role in ("bos", "eos", "pad"):
            assert getattr(loaded, f"{role}_token_id") == getattr(trained, f"{role}_token_id")
        assert loaded.encode(sample) == trained.encode(sample)
        assert loaded.chat_template is None


def test_files_that_are_written(trained, saved):
    expected = {"tokenizer.json", "tokenizer_config.json"}
    if trained.tokenizer_type == "sentencepiece":
        expected.add("tokenizer.model")
        assert load(saved / "tokenizer.model").fingerprint == trained.fingerprint
    assert {path.name for path in saved.iterdir()} == expected


def test_the_chat_template_is_saved_and_not_part_of_the_fingerprint(saved, tmp_path):
    tokenizer = load(saved)
    before = tokenizer.fingerprint
    tokenizer.chat_template = "{{ messages }} ▁é"
    tokenizer.save(tmp_path / "chat")
    loaded = load(tmp_path / "chat")
    assert loaded.chat_template == "{{ messages }} ▁é"
    assert loaded.fingerprint == before
    (tmp_path / "chat" / "chat_template.jinja").write_text("from its own file")
    assert load(tmp_path / "chat").chat_template == "from its own file"


def test_named_chat_templates(saved):
    templates = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    change(saved / "tokenizer_config.json", chat_template=templates)
    assert load(saved).chat_template == "b"


def test_special_tokens_of_the_configuration(saved):
    change(saved / "tokenizer_config.json", bos_token=None, eos_token={"content": "<|end|>"})
    tokenizer = load(saved)
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id == tokenizer.special_tokens["<|end|>"]


def test_special_tokens_of_the_map_and_usual_names(saved):
    (saved / "tokenizer_config.json").unlink()
    (saved / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    tokenizer = load(saved)
    assert tokenizer.eos_token_id == tokenizer.special_tokens["<|user|>"]
    assert tokenizer.bos_token_id == tokenizer.encode("")[0]
    assert tokenizer.pad_token_id == tokenizer.special_tokens["<|pad|>"]


def test_truncation_and_padding_of_a_file_are_ignored(trained, saved):
    runtime = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    runtime.enable_truncation(4)
    runtime.enable_padding(length=64)
    runtime.save(str(saved / "tokenizer.json"))
    loaded = load(saved)
    assert loaded.encode("one two three " * 20) == trained.encode("one two three " * 20)
    assert loaded.fingerprint == trained.fingerprint


def test_gpt2(gpt2, gpt2_folder):
    assert gpt2.vocab_size == 50257
    assert gpt2.bos_token_id == gpt2.eos_token_id == gpt2.special_tokens["<|endoftext|>"] == 50256
    assert gpt2.encode("Hello world") == [15496, 995]
    assert load(gpt2_folder / "merges.txt").fingerprint == gpt2.fingerprint


def test_llama2(llama2, llama2_folder):
    assert llama2.vocab_size == 32000
    assert (llama2.unk_token_id, llama2.bos_token_id, llama2.eos_token_id, llama2.pad_token_id) == (0, 1, 2, None)
    assert llama2.encode("Hello world") == [1, 15043, 3186]
    assert llama2.adds_dummy_prefix
    assert load(llama2_folder / "tokenizer.model").fingerprint == llama2.fingerprint


def test_llama2_without_bos(llama2_folder, tmp_path):
    shutil.copy(llama2_folder / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert load(tmp_path).encode("Hello world") == [15043, 3186, 2]


@pytest.mark.parametrize("content", [b"", b'{"model": ', b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe\0"])
def test_malformed_json(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"not a protobuf", b"\x80\x04\x95.", b"\0" * 50])
def test_malformed_sentencepiece(content, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer.model"):
        load(path)


def test_truncated_sentencepiece(llama2_folder, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes((llama2_folder / "tokenizer.model").read_bytes()[:100_000])
    with pytest.raises(TokenizerError, match="tokenizer.model"):
        load(path)


@pytest.mark.parametrize("merges", [None, "", "a b c d\n", "x y\n"])
def test_missing_or_malformed_merges(merges, tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    if merges is not None:
        (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(TokenizerError, match="merges.txt"):
        load(tmp_path)


@pytest.mark.parametrize("vocabulary", ["[1]", '{"a": "b"}', '{"a": -1}', "{"])
def test_malformed_vocabulary(vocabulary, tmp_path):
    (tmp_path / "vocab.json").write_text(vocabulary)
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(TokenizerError, match="vocab.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "field"), [({"bos_token": 3}, "bos_token"), ({"chat_template": 3}, "chat_template")]
)
def test_malformed_configuration(saved, fields, field):
    change(saved / "tokenizer_config.json", **fields)
    with pytest.raises(TokenizerError, match=f"tokenizer_config.json: '{field}'"):
        load(saved)


def test_paths_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match="no tokenizer in"):
        load(tmp_path)
    with pytest.raises(TokenizerError, match="no such file"):
        load(tmp_path / "absent")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(TokenizerError, match="not a tokenizer file"):
        load(tmp_path / "model.safetensors")


def test_a_folder_that_cannot_be_written(trained, tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(TokenizerError, match="cannot write a tokenizer to"):
        trained.save(tmp_path / "file" / "folder")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_full_disk_leaves_the_old_files(trained, saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TokenizerError, match="No space left on device .*free some disk space"):
        trained.save(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_bpe", "llama2", "gpt2"])
def test_transformers_and_mlx_lm_agree(name, request, tmp_path, sample):
    import mlx_lm.tokenizer_utils

    tokenizer, folder = request.getfixturevalue(name), tmp_path
    tokenizer.save(folder)
    wrapper = mlx_lm.tokenizer_utils.load(folder)
    reference = wrapper._tokenizer  # AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(sample, parse_special=True)
    assert load(folder).fingerprint == tokenizer.fingerprint
    assert reference.encode(sample) == ids
    assert reference.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    plain = sample.replace("<", "")
    assert reference.decode(reference.encode(plain), skip_special_tokens=True) == tokenizer.decode(
        tokenizer.encode(plain)
    )
    assert len(reference) == tokenizer.vocab_size
    assert (reference.bos_token_id, reference.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (reference.pad_token_id, reference.unk_token_id) == (tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert wrapper.encode(sample) == ids
    assert wrapper.eos_token_ids == {tokenizer.eos_token_id}


def replace_step(content: str, pattern: str = "a", pattern_type: str = "String") -> dict:
    return {"type": "Replace", "pattern": {pattern_type: pattern}, "content": content}


def sequence(key: str, steps: list[dict]) -> dict:
    return {"type": "Sequence", key: steps}


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


LETTERS = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}


CHARSMAP = base64.b64encode(b"\xff\xff\xff\xff" + bytes(100)).decode()


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("normalizer", sequence("normalizers", [replace_step("a" * 10)] * 10), "normalizer can make a text"),
        ("normalizer", replace_step("a" * 1000), "normalizer can make a text"),
        ("normalizer", replace_step("x" * 100, ""), "normalizer can make a text"),
        ("normalizer", sequence("normalizers", [replace_step("a", "(?<=a)|b*", "Regex")] * 40), "normalizer can make"),
        (
            "normalizer",
            sequence("normalizers", [replace_step("\ufdfa"), {"type": "NFKD"}, replace_step("a" * 9, "\u0635")] * 5),
            "normalizer can make a text more than 64 times",
        ),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}, "precompiled_charsmap has 104 bytes"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 1000}, "normalizer.prepend is longer than 256 bytes"),
        ("pre_tokenizer", sequence("pretokenizers", [BYTE_LEVEL] * 40), "pre_tokenizer can make a text"),
        ("pre_tokenizer", sequence("pretokenizers", [LETTERS, METASPACE] * 40), "pre_tokenizer can make a text"),
        ("decoder", sequence("decoders", [replace_step("a" * 10)] * 10), "decoder can make a text"),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": [TEXT] * 2, "pair": [TEXT], "special_tokens": {}},
            "post_processor.single repeats a text",
        ),
    ],
)
def test_tokenizers_that_make_texts_long_are_refused(tmp_path, tiny_tokenizer, field, value, expected):
    content = json.loads(tiny_tokenizer.to_json())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, field: value}))
    with pytest.raises(TokenizerError, match=expected):
        load(tmp_path)


def test_long_added_tokens_are_refused_before_they_are_normalized(tmp_path, tiny_tokenizer):
    content = json.loads(tiny_tokenizer.to_json())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    content["added_tokens"] += [{"id": 500 + i, "content": f"{i}" + "a" * 30_000, **token} for i in range(60)]
    content["normalizer"] = replace_step("a" * 20)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="added_tokens are longer than"):
        load(tmp_path)


def test_huge_tokens_are_refused(tmp_path, tiny_tokenizer):
    content = json.loads(tiny_tokenizer.to_json())
    content["model"]["vocab"]["a" * 70_000] = 500
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="a token has more than 65536 characters"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        # Llama 2 and Gemma; T5 and XLM-R; ALBERT; CLIP; BERT; byte-level after other steps
        ([{"type": "Prepend", "prepend": "\u2581"}, replace_step("\u2581", " ")], []),
        ([{"type": "NFKC"}, replace_step("\u2581", " {2,}", "Regex")], [METASPACE]),
        ([replace_step('"', "``"), replace_step('"', "''"), {"type": "NFKD"}, {"type": "StripAccents"}], [METASPACE]),
        ([{"type": "NFC"}, replace_step(" ", r"\s+", "Regex"), {"type": "Lowercase"}], [LETTERS, BYTE_LEVEL]),
        (
            [{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
              "lowercase": True}],
            [{"type": "BertPreTokenizer"}],
        ),
        ([replace_step("...", "\u2026"), replace_step("<n>", "\n"), replace_step("<tabulator>", "\t")], []),
    ],
)  # fmt: skip
def test_the_steps_of_known_tokenizers_are_accepted(tmp_path, tiny_tokenizer, normalizer, pre_tokenizer):
    content = json.loads(tiny_tokenizer.to_json())
    content["normalizer"] = sequence("normalizers", normalizer)
    content["pre_tokenizer"] = sequence("pretokenizers", pre_tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load(tmp_path).encode("the cat\n sat")
