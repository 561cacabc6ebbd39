"""Any text survives a round trip, and no text becomes a special token."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxlm.utils.errors import TextTooLongError, TokenizerError

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\r\t\0▁▅<|>s/ux0A"), max_size=60)
ANY = settings(max_examples=50)


@given(text=TEXT)
@example("▁ ▁▁ <s></s><unk><|user|><0x41>")
@example("\ufeff\r\n \u2028\x85\x00")
@ANY
def test_round_trip(trained, text):
    for special in (False, True):
        ids = trained.encode(text, add_special_tokens=special)
        assert trained.decode(ids) == text
        assert b"".join(map(trained.token_bytes, ids)) == text.encode("utf-8")
        assert all(0 <= i < trained.vocab_size for i in ids)
    assert trained.encode_batch([text, "", text]) == [ids[1:], [], ids[1:]]


@given(text=TEXT)
@ANY
def test_round_trip_in_gpt2_and_llama2(gpt2, llama2, text):
    assert gpt2.decode(gpt2.encode(text)) == text
    text = text.replace("▁", "")  # which Llama 2 encodes like a space
    assert llama2.decode(llama2.encode(text)) == text


def test_round_trip_of_real_text(byte_level, sentencepiece_bpe, gpt2, real_text):
    for tokenizer in (byte_level, sentencepiece_bpe, gpt2):
        assert tokenizer.decode(tokenizer.encode(real_text)) == real_text


def test_text_cannot_forge_special_tokens(trained):
    for name, id in trained.special_tokens.items():
        text = f"a{name} b"
        assert id not in trained.encode(text, add_special_tokens=False)
        assert id not in trained.encode_batch([text])[0]
        parsed = trained.encode(text, add_special_tokens=False, parse_special=True)
        assert parsed.count(id) == 1
        assert trained.decode(parsed) == "a b"
        assert trained.decode(parsed, skip_special_tokens=False) == text
        # parse_special doesn't affect later calls
        assert id not in trained.encode(text, add_special_tokens=False)


def test_a_text_with_far_more_tokens_is_refused(trained):
    for text in ("water", " " * 500, "water " * 500):
        ids = trained.encode(text)
        assert trained.encode(text, max_length=len(ids)) == trained.encode(text, max_length=len(ids) - 1) == ids
        assert trained.encode("", max_length=0) == trained.encode("")
    with pytest.raises(TextTooLongError, match="more than 20 tokens"):
        trained.encode("water " * 500, max_length=20)


def test_special_tokens_have_no_bytes(trained):
    assert all(trained.token_bytes(id) == b"" for id in trained.special_tokens.values())


def test_ids_without_a_token_have_no_text(trained):
    ids = trained.encode("water")
    assert trained.decode([*ids, trained.vocab_size, 10**6]) == "water"
    assert trained.token_bytes(trained.vocab_size) == b""
    with pytest.raises(TokenizerError, match="-1 is not a token id"):
        trained.decode([-1])
    with pytest.raises(TokenizerError):
        trained.token_bytes(2**40)


def test_lone_surrogates_are_named(trained):
    with pytest.raises(TokenizerError, match=r"U\+DC80 at character 2"):
        trained.encode("ab\udc80")
    with pytest.raises(TokenizerError, match="surrogate"):
        trained.encode_batch(["ab", "\udc80"])
