"""A tokenizer.json that makes texts very long is refused; those of known families are read."""

import base64
import json

import pytest

from mlxlm.tokenizer import load
from mlxlm.utils.errors import TokenizerError


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
