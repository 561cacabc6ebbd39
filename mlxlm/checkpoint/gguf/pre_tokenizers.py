"""How llama.cpp's byte-level tokenizers cut a text into words before merging, by the name in `tokenizer.ggml.pre`.

Facts from src/llama-vocab.cpp (names, flags, expressions), in the form that the tokenizer.json of each name's
model has. Names whose expressions llama.cpp only approximates, or that nobody's decoder here uses, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from mlxlm.utils.errors import TokenizerError

_BYTES = "bytes"  # bytes become printable characters: at the end, or with GPT-2's expression
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _THREE = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
_LLAMA3_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _LLAMA3_REST
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", _DIGIT)
_PUNCTUATION = "punctuation"  # runs of Unicode's and ASCII's
_BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|{_DIGIT}{_REST}"
_GPT4O = rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_REST}"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
_FALCON = "llama.cpp cuts Falcon's words otherwise where a UTF-8 byte is one of Latin-1's ², ³, ¹, ¼, ½ or ¾"
_NFC = "llama.cpp doesn't bring text to NFC first: other ids for characters that are written decomposed"


@dataclass(frozen=True)
class PreTokenizerSpec:
    """The steps that cut a text, each within the pieces of the one before.

    `ignore_merges`: a word that is a token is that token, whatever the merges would make of it. `add_bos`: what
    llama.cpp does where a file doesn't say. `nfc`: the models' own tokenizers bring text to NFC first.
    `mismatch`: where llama.cpp cuts otherwise than they do.
    """

    steps: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    mismatch: str | None = None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = self.steps if _GPT2 in self.steps else (*self.steps, _BYTES)
        parts = [_step(step) for step in steps]
        return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_PRES = (
    (PreTokenizerSpec((_GPT2,)), "gpt-2 olmo mpt jais phi-2 trillion exaone4 roberta-bpe"),
    (
        PreTokenizerSpec((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
    ),
    (PreTokenizerSpec((_LLAMA3,), ignore_merges=True), "glm4"),
    (PreTokenizerSpec((_LLAMA3,)), "smaug-bpe dbrx chatglm-bpe"),
    (PreTokenizerSpec((_QWEN,), nfc=True), "qwen2"),
    (PreTokenizerSpec((_QWEN,)), "stablelm2 deepseek-r1-qwen megrez hunyuan"),
    (PreTokenizerSpec((_DIGIT, _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (PreTokenizerSpec((_PUNCTUATION, _GPT2, _DIGITS, _THREE), mismatch=_FALCON), "falcon"),
    (PreTokenizerSpec((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizerSpec((_BLOOM, _DIGIT)), "viking"),
    (PreTokenizerSpec((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizerSpec((_GPT4O,)), "gpt-4o llama4"),
    (PreTokenizerSpec(_DEEPSEEK), "deepseek-v3"),
)
PRE_TOKENIZERS = {name: pre for pre, names in _PRES for name in names.split()}


def find_pre_tokenizer(model: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The name under which llama.cpp cuts words as the tokenizer.json `model` does, and where it does otherwise.

    Raises TokenizerError for a tokenizer that llama.cpp has no name for.
    """
    normalizer = model.get("normalizer")
    parts = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kinds = [part["type"] for part in parts]
    found = _flat(model.get("pre_tokenizer"))
    steps = tuple(found[:-1] if found[-1:] == [_BYTES] else found if _GPT2 in found else ())
    ignores = bool(model["model"].get("ignore_merges"))
    names = [name for name, pre in PRE_TOKENIZERS.items() if (pre.steps, pre.ignore_merges) == (steps, ignores)]
    if not names or kinds not in ([], ["NFC"]):
        what = "splits words" if not names else f"normalizes text ({', '.join(kinds)})"
        raise TokenizerError(
            f"llama.cpp has no name for this tokenizer: it {what} in a way of its own",
            "one of " + ", ".join(names.split()[0] for _, names in _PRES),
        )
    nfc = kinds == ["NFC"]
    name = next((name for name in names if PRE_TOKENIZERS[name].nfc == nfc), names[0])
    return name, [note for note in (_NFC if nfc else None, PRE_TOKENIZERS[name].mismatch) if note]


def _step(step: str) -> pre_tokenizers.PreTokenizer:
    if step == _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if step == _BYTES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if step == _PUNCTUATION:
        return pre_tokenizers.Punctuation("contiguous")
    if step in (_DIGIT, _DIGITS):
        return pre_tokenizers.Digits(individual_digits=step == _DIGIT)
    return pre_tokenizers.Split(Regex(step), "isolated")


def _flat(step: Mapping[str, Any] | None) -> list[str]:
    """The steps of a tokenizer.json's pre_tokenizer; "?" for one that no `PreTokenizerSpec` has."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        return [name for part in step["pretokenizers"] for name in _flat(part)]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2] if step.get("use_regex", True) else [_BYTES]
    if kind == "Digits":
        return [_DIGIT if step["individual_digits"] else _DIGITS]
    if kind == "Punctuation" and step.get("behavior") == "Contiguous":
        return [_PUNCTUATION]
    pattern = step.get("pattern", {}).get("Regex") if kind == "Split" else None
    # An expression that matches all of a text leaves nothing between its matches to isolate or remove.
    how = {("Isolated", False)} | ({("Removed", True), ("Isolated", True)} if str(pattern).endswith(r"|\s+") else set())
    if pattern is None or (step.get("behavior"), step.get("invert")) not in how:
        return ["?"]
    return [_SPELLINGS.get(pattern, pattern)]


# The same expressions in other words.
_SPELLINGS = {
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])" + _LLAMA3_REST: _LLAMA3,
    r" ?[^(\s|.,!?…。，、।۔،)]+": _BLOOM,
}
