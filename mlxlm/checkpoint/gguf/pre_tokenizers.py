"""llama.cpp's pre-tokenizers for byte-level BPE, by the name in `tokenizer.ggml.pre`.

Names, flags and expressions of src/llama-vocab.cpp, in the form of the tokenizer.json of each name's model. Names whose
expressions llama.cpp only approximates, and those of architectures that aren't supported here, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from mlxlm.utils.errors import TokenizerError

_BYTES = "bytes"  # map bytes to printable characters: at the end, or with GPT-2's expression
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT, _DIGITS, _THREE = r"\p{N}", r"\p{N}+", "[0-9][0-9][0-9]"
_LLAMA3_REST = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + _LLAMA3_REST
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", _DIGIT)
_QWEN35 = _QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}{1}").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
_PUNCTUATION = "punctuation"  # runs of Unicode and ASCII punctuation
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
_FALCON = "llama.cpp splits text differently for Falcon where a UTF-8 byte is Latin-1's ², ³, ¹, ¼, ½ or ¾"
_NFC = "llama.cpp doesn't normalize text to NFC: decomposed characters get other ids"


@dataclass(frozen=True)
class PreTokenizerSpec:
    """The steps that split a text, each within the pieces of the previous one.

    Attributes:
        steps: Regular expressions and the constants above.
        ignore_merges: A piece that is a token isn't merged from smaller ones.
        add_bos: llama.cpp's default of `tokenizer.ggml.add_bos_token`.
        nfc: The models' tokenizers normalize text to NFC.
        mismatch: Where llama.cpp splits differently than the models' tokenizers.
    """

    steps: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    mismatch: str | None = None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The same steps as a pre-tokenizer."""
        steps = self.steps if _GPT2 in self.steps else (*self.steps, _BYTES)
        parts = [_step(step) for step in steps]
        return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer, if there is one."""
        return normalizers.NFC() if self.nfc else None


_SPECS = (
    (PreTokenizerSpec((_GPT2,)), "gpt-2 olmo mpt jais phi-2 trillion exaone4 roberta-bpe"),
    (
        PreTokenizerSpec((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
    ),
    (PreTokenizerSpec((_LLAMA3,), ignore_merges=True), "glm4"),
    (PreTokenizerSpec((_LLAMA3,)), "smaug-bpe dbrx chatglm-bpe"),
    (PreTokenizerSpec((_QWEN,), nfc=True), "qwen2"),
    (PreTokenizerSpec((_QWEN35,), nfc=True), "qwen35"),
    (PreTokenizerSpec((_QWEN,)), "stablelm2 deepseek-r1-qwen megrez hunyuan"),
    (PreTokenizerSpec((_DIGIT, _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (PreTokenizerSpec((_PUNCTUATION, _GPT2, _DIGITS, _THREE), mismatch=_FALCON), "falcon"),
    (PreTokenizerSpec((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizerSpec((_BLOOM, _DIGIT)), "viking"),
    (PreTokenizerSpec((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizerSpec((_GPT4O,)), "gpt-4o llama4 minimax-m2"),
    (PreTokenizerSpec((_SEED,)), "seed-coder"),
    (PreTokenizerSpec(_DEEPSEEK), "deepseek-v3"),
)
PRE_TOKENIZERS = {name: pre for pre, names in _SPECS for name in names.split()}


def find_pre_tokenizer(model: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Find llama.cpp's name for the pre-tokenizer of a tokenizer.json.

    Returns:
        The name, and notes about where llama.cpp tokenizes differently.

    Raises:
        TokenizerError: llama.cpp has no name for it.
    """
    normalizer = model.get("normalizer")
    parts = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kinds = [part["type"] for part in parts]
    flat = _flatten(model.get("pre_tokenizer"))
    steps = tuple(flat[:-1] if flat[-1:] == [_BYTES] else flat if _GPT2 in flat else ())
    ignores = bool(model["model"].get("ignore_merges"))
    names = [name for name, pre in PRE_TOKENIZERS.items() if (pre.steps, pre.ignore_merges) == (steps, ignores)]
    if not names or kinds not in ([], ["NFC"]):
        problem = f"normalizes text ({', '.join(kinds)})" if names else "splits text"
        raise TokenizerError(
            f"llama.cpp doesn't support the way this tokenizer {problem}",
            "one of " + ", ".join(names.split()[0] for _, names in _SPECS),
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


def _flatten(step: Mapping[str, Any] | None) -> list[str]:
    """The steps of a tokenizer.json's pre_tokenizer; "?" for an unknown one."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        return [name for part in step["pretokenizers"] for name in _flatten(part)]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2] if step.get("use_regex", True) else [_BYTES]
    if kind == "Digits":
        return [_DIGIT if step["individual_digits"] else _DIGITS]
    if kind == "Punctuation" and step.get("behavior") == "Contiguous":
        return [_PUNCTUATION]
    pattern = step.get("pattern", {}).get("Regex") if kind == "Split" else None
    # An expression that matches all of a text leaves nothing between its matches to isolate or remove.
    equivalent = {("Isolated", False)} | (
        {("Removed", True), ("Isolated", True)} if str(pattern).endswith(r"|\s+") else set()
    )
    if pattern is None or (step.get("behavior"), step.get("invert")) not in equivalent:
        return ["?"]
    pattern = pattern.replace("\r", r"\r").replace("\n", r"\n")
    return [_SPELLINGS.get(pattern, pattern)]


# Other spellings of the same expressions.
_SPELLINGS = {
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])" + _LLAMA3_REST: _LLAMA3,
    r" ?[^(\s|.,!?…。，、।۔،)]+": _BLOOM,
}
