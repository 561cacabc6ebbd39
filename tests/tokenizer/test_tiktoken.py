"""tiktoken's vocabulary files give the ids of tiktoken."""

from __future__ import annotations

import base64
import json
import random

import pytest

from mlxlm.tokenizer import load, tiktoken, train
from mlxlm.tokenizer.detokenizer import CHARACTER_OF_BYTE
from mlxlm.utils.errors import TokenizerError

BYTES = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
TEXTS = [
    "Hello  world!\n\n\tIt's 12345 o'clock, aaaaaaaa bbbb",
    "Ünïcödé 你好 🦙🦙 <|eot_id|>",
    "",
    " ",
    "\r\n \r\n x",
    "a" * 50,
]


def vocabulary(text: str, size: int) -> dict[bytes, int]:
    """The ranks of a vocabulary that is trained on a text."""
    tokens = json.loads(train([text], size).to_json())["model"]["vocab"]
    known = [token for token in tokens if not token.startswith("<|")]
    ordered = sorted(known, key=lambda token: (len(token) > 1, tokens[token]))
    return {bytes(map(BYTES.__getitem__, token)): rank for rank, token in enumerate(ordered)}


def write(path, ranks):
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize(("program", "name"), [("LLAMA3", "tokenizer.model"), ("QWEN", "qwen.tiktoken")])
def test_ids_are_those_of_tiktoken(tmp_path, monkeypatch, make_text, program, name):
    oracle = pytest.importorskip("tiktoken")
    numbers = random.Random(1)
    noise = " ".join("".join(numbers.choices("aab ", k=9)) for _ in range(2000))
    ranks = vocabulary(make_text(3000) + noise, 500)
    ranks[b" zebra"] = len(ranks)  # no merge makes it: only the whole word is this token
    program = getattr(tiktoken, program)
    monkeypatch.setattr(tiktoken, "PROGRAMS", {len(ranks): program})
    tokenizer = load(write(tmp_path / name, ranks).parent)
    special = {text: len(ranks) + i for i, text in enumerate(program.special_tokens)}
    expected = oracle.Encoding("x", pat_str=program.pattern, mergeable_ranks=ranks, special_tokens=special)
    texts = (
        TEXTS + ["".join(numbers.choices("aabc the\n", k=60)) for _ in range(300)] + [make_text(100), "a zebra, zebras"]
    )
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected.encode(text, disallowed_special=())
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_tokens == special and len(program.special_tokens) in (256, 208)
    bos = [] if program.bos is None else [special[program.bos]]
    assert tokenizer.encode("the") == bos + expected.encode("the")
    tokenizer.save(tmp_path / "saved")
    assert load(tmp_path / "saved").encode(texts[0]) == tokenizer.encode(texts[0])


def test_llama_3_ids():
    ids = {text: 128_000 + i for i, text in enumerate(tiktoken.LLAMA3.special_tokens)}
    assert (ids["<|begin_of_text|>"], ids["<|eot_id|>"], ids["<|end_header_id|>"]) == (128_000, 128_009, 128_007)
    assert (ids["<|reserved_special_token_2|>"], ids["<|reserved_special_token_247|>"]) == (128_005, 128_255)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: [*lines, b"!!! 256"], "line 257 is not a token in Base64 and its rank"),
        (lambda lines: [*lines, b"YWI= -"], "line 257 is not a token"),
        (lambda lines: [*lines, b"YWI= 258"], "the ranks are not all numbers from 0 to 256"),
        (lambda lines: [*lines, lines[7]], "the token in line 257 occurs twice"),
        (lambda lines: [*lines, base64.b64encode(b"a" * 513) + b" 256"], "has 513 bytes, 1 to 512 are possible"),
        (lambda lines: [*lines[:-1], b"YWI= 255"], "has no token for the byte 255"),
        (lambda lines: lines, "has 256 tokens, and doesn't say how text is split .*128000 or 151643 tokens"),
    ],
)
def test_malformed_files(tmp_path, change, expected):
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
    (tmp_path / "x.tiktoken").write_bytes(b"\n".join(change(lines)))
    with pytest.raises(TokenizerError, match=f"x.tiktoken.*{expected}"):
        load(tmp_path)
