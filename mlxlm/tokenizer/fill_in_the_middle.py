"""Fill-in-the-middle: prompts for the text between a prefix and a suffix, for models that were trained with them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from mlxlm.tokenizer.tokenizer import Tokenizer, check_length
from mlxlm.utils.errors import TokenizerError

# Prefix, suffix, middle (PSM in Bavarian et al. 2022, arXiv:2207.14255), except for Codestral.
_FORMATS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen2.5-Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek-Coder
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # CodeLlama
    "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",  # GLM-4
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)
_TEXTS = ("prefix", "suffix")
# Between the files of a repository (Qwen2.5-Coder technical report, arXiv:2409.12186; StarCoder 2).
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
# What models write after the middle, apart from the tokens above.
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", "▁<EOT>")


class FillInTheMiddle:
    """The prompts of a tokenizer for the text between a prefix and a suffix.

    Attributes:
        end_token_ids: Tokens that end the middle, besides the model's EOS tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Find the format whose tokens the tokenizer has.

        Raises:
            TokenizerError: There is none.
        """
        self._tokenizer = tokenizer
        formats = [[part for part in re.split(r"\{(\w+)\}", template) if part] for template in _FORMATS]
        parts = next((parts for parts in formats if len(self._ids(parts)) == len(parts) - len(_TEXTS)), None)
        if parts is None:
            hint = "a model for code, such as Qwen2.5-Coder"
            raise TokenizerError("this model can't fill in the middle: its tokenizer has no tokens for a suffix", hint)
        self._parts = parts
        self._separator = self._ids(_FILE_SEPARATORS)[:1]
        self.end_token_ids = frozenset(self._ids([*parts, *_FILE_SEPARATORS, *_ENDS]))

    def encode(
        self,
        prefix: str,
        suffix: str,
        start: str = "",
        files: Sequence[tuple[str, str]] = (),
        *,
        max_length: int = sys.maxsize,
    ) -> list[int]:
        """Encode a prompt. Special tokens in the texts are ordinary text.

        Args:
            prefix: The text before the middle.
            suffix: The text after it.
            start: The beginning of the middle.
            files: Names and texts of other files, for context.
            max_length: See `Tokenizer.encode`.
        """
        encode, texts = self._tokenizer.encode, {"prefix": prefix, "suffix": suffix}
        ids = self._tokenizer.prefix_token_ids
        for name, text in files:
            ids += self._separator + encode(f"{name}\n{text}\n", continues=True, max_length=max_length)
            check_length(ids, max_length)
        ids += self._separator if files else []
        for part in self._parts:
            if part in texts:
                # CodeLlama's prefix has a dummy prefix, its suffix none.
                ids += encode(texts[part], add_special_tokens=False, continues=part == "suffix", max_length=max_length)
            else:
                ids += self._ids([part])
        return ids + encode(start, continues=True, max_length=max_length)

    def _ids(self, tokens: Sequence[str]) -> list[int]:
        """The ids of those tokens that the tokenizer has."""
        ids = [self._tokenizer.token_id(token) for token in tokens if token not in _TEXTS]
        return [id for id in ids if id is not None]
