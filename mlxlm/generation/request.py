"""A request for one text: its prompt and options, and whether a model can serve it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from mlxlm.cache import KVOptions
from mlxlm.generation.constraint import Grammar
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.gumbel_noise import derive_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.penalties import dry_breaker_mask
from mlxlm.generation.sampling_functions import SamplingFunctions
from mlxlm.utils.errors import GenerationError, PromptTooLongError


@dataclass(frozen=True)
class Request:
    """One text to generate.

    Attributes:
        prompt: The ids of the prompt.
        options: Sampling options and the end of the text.
        eos_token_ids: Tokens that end the text; None for the model's.
        snapshot_at: Where in the prompt a later one may differ from it, in tokens, such as the start of the last
            message. Caches that can't be trimmed (sliding windows, rotating caches) can return there.
        functions: The caller's functions that take part in sampling; the text is decoded by itself then.
        skip_special_tokens: Whether special tokens aren't part of the text, unless a grammar asks for them.
    """

    prompt: Sequence[int]
    options: GenerationOptions
    eos_token_ids: frozenset[int] | None = None
    snapshot_at: int | None = None
    functions: SamplingFunctions | None = None
    skip_special_tokens: bool = True

    def sample(self, id: str, number: int) -> Request:
        """The request for sample `number`, from 0, with a seed derived from this one's seed (or 0) and `id`."""
        return replace(self, options=self.options.with_seed(derive_seed(self.options.seed or 0, id, number)))

    def to_dict(self) -> dict[str, Any]:
        """The request for JSON, without `functions`; see `from_dict`."""
        ends = None if self.eos_token_ids is None else sorted(self.eos_token_ids)
        options = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
        others = {"snapshot_at": self.snapshot_at, "skip_special_tokens": self.skip_special_tokens}
        return {"prompt": list(self.prompt), "options": options, "eos_token_ids": ends, **others}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The request that `to_dict` has converted."""
        ends = values["eos_token_ids"]
        converted = {
            "options": GenerationOptions(**values["options"]),
            "eos_token_ids": None if ends is None else frozenset(ends),
        }
        return cls(**{**values, **converted})

    def compile_grammar(self, lm: LoadedModel) -> Grammar | None:
        """Compile the constraint of the options, if there is one. Raises GenerationError as `Grammar.compile`."""
        eos_token_ids = lm.eos_token_ids if self.eos_token_ids is None else self.eos_token_ids
        return Grammar.compile(self.options, lm.tokenizer, lm.config.vocab_size, eos_token_ids)

    def check(self, lm: LoadedModel, kv: KVOptions) -> int:
        """Return how many tokens may follow the prompt: as `max_new_tokens_for`.

        Raises:
            GenerationError: For a prompt or options that this model can't serve.
        """
        if self.functions is not None and self.functions.sampler is not None and self.options.constraint is not None:
            problem = f"a sampler can't be combined with {self.options.constraint}, nor with tools"
            raise GenerationError(problem, "logits_processors")
        self.options.check_vocabulary(lm.config.vocab_size)
        dry_breaker_mask(self.options, lm.tokenizer)
        return max_new_tokens_for(lm, self.prompt, kv)


def max_new_tokens_for(lm: LoadedModel, prompt: Sequence[int], kv: KVOptions) -> int:
    """How many tokens may follow a prompt: the rest of `context_limit`.

    Raises:
        GenerationError: For a prompt that is empty, too long or has unknown ids, and for a rotating cache that is
            larger than the context.
    """
    if not prompt:
        raise GenerationError("the prompt is empty", "some text to continue")
    vocab_size, context_length = lm.config.vocab_size, lm.config.max_position_embeddings
    are_ints = all(issubclass(kind, int) for kind in set(map(type, prompt)))
    if not are_ints or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise GenerationError("the prompt has ids that this model doesn't have", f"ids from 0 to {vocab_size - 1}")
    if kv.size is not None and kv.size > context_length:
        raise GenerationError(
            f"a cache of {kv.size} tokens is more than the model's context of {context_length}", f"{context_length}"
        )
    if context_limit(lm, kv) == UNLIMITED:
        return UNLIMITED
    if len(prompt) >= context_length:
        # Clients of OpenAI's and Anthropic's APIs look for these phrases, to shorten the conversation.
        size = f"{len(prompt)} tokens, and this model's maximum context length is {context_length}"
        raise PromptTooLongError(f"the prompt is too long: {size}", f"at most {context_length - 1} tokens")
    return context_length - len(prompt)


def context_limit(lm: LoadedModel, kv: KVOptions) -> int:
    """How many tokens a prompt and its text may have together: the model's context.

    UNLIMITED with a rotating cache, unless positions are learned.
    """
    if kv.size is not None and getattr(lm.config, "positions", None) != "learned":
        return UNLIMITED
    length: int = lm.config.max_position_embeddings
    return length


def encode_prompt(lm: LoadedModel, prompt: str | Sequence[int], max_length: int = sys.maxsize) -> Sequence[int]:
    """Encode a prompt, unless it is token ids already. An empty text becomes BOS. See `Tokenizer.encode`.

    Raises:
        GenerationError: For anything else, and for an empty text if the tokenizer has no BOS.
    """
    if not isinstance(prompt, str):
        with suppress(TypeError):
            if not isinstance(prompt, bytes):  # whose items are integers
                return [operator.index(token) for token in prompt]  # also NumPy's integers
        raise GenerationError("the prompt is neither a text nor a list of ids", '"Once upon a time"')
    if prompt:
        return lm.tokenizer.encode(prompt, max_length=max_length)
    bos = lm.tokenizer.bos_token_id
    ids = lm.tokenizer.prefix_token_ids or ([] if bos is None else [bos])
    if not ids:
        raise GenerationError("the prompt is empty, and the model has no BOS token to begin with", "text to continue")
    return ids
