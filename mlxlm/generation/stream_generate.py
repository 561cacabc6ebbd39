"""Generating one text: all at once, or in chunks."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from mlxlm.cache import KVOptions
from mlxlm.generation.engine import get_engine
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import OptionArguments
from mlxlm.generation.request import Request
from mlxlm.generation.result import GenerationResult
from mlxlm.generation.text_stream import TextStream
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


def generate(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    eos_token_ids: frozenset[int] | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Unpack[OptionArguments],
) -> GenerationResult:
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    return stream(lm, prompt, eos_token_ids=eos_token_ids, kv=kv, speculation=speculation, **options).result()


def stream(
    lm: LoadedModel,
    prompt: str | Sequence[int],
    *,
    eos_token_ids: frozenset[int] | None = None,
    kv: KVOptions | None = None,
    speculation: SpeculativeDecoder | None = None,
    **options: Unpack[OptionArguments],
) -> TextStream:
    """Continue `prompt`, in chunks.

    Arguments, result and errors are those of `mlxlm.stream`. `eos_token_ids` are the tokens that end the text; None for
    the model's.
    """
    settings = lm.generation_options(("eos_token_ids", "kv", "speculation"), **options)
    engine = get_engine(lm, kv, speculation)
    request = Request(encode_prompt(lm, prompt), settings, eos_token_ids)
    request.compile_grammar(lm)  # raises here, not when the stream is iterated
    return engine.submit(request)


def encode_prompt(lm: LoadedModel, prompt: str | Sequence[int], max_length: int = sys.maxsize) -> Sequence[int]:
    """Encode a prompt, unless it is token ids already. An empty text becomes BOS. See `Tokenizer.encode`.

    Raises:
        GenerationError: For anything else, and for an empty text if the tokenizer has no BOS.
    """
    if not isinstance(prompt, str):
        try:
            return [operator.index(token) for token in prompt]  # also NumPy's integers
        except TypeError:
            raise GenerationError("the prompt is neither a text nor a list of ids", '"Once upon a time"') from None
    if prompt:
        return lm.tokenizer.encode(prompt, max_length=max_length)
    bos = lm.tokenizer.bos_token_id
    ids = lm.tokenizer.prefix_token_ids or ([] if bos is None else [bos])
    if not ids:
        raise GenerationError("the prompt is empty, and the model has no BOS token to begin with", "text to continue")
    return ids
