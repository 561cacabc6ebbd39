"""Generation: prefill a prompt, decode token by token, stream text.

`mlxlm.load`, `mlxlm.generate` and `mlxlm.stream` are those of this package:

    loaded = load("runs/stories")
    print(generate(loaded, "Once upon a time", temperature=0.8, seed=1).text)
    for chunk in stream(loaded, "Once upon a time"):
        print(chunk.text, end="")
"""

import sys
import types
from collections.abc import Sequence
from typing import Any

from mlxlm.errors import GenerationError
from mlxlm.generate.engine import Context, tokens
from mlxlm.generate.loaded import LoadedModel, load
from mlxlm.generate.sampling import Sampler, SamplingOptions, filtered_logits
from mlxlm.generate.text import Chunk, FinishReason, GenerationOptions, Result, TextStream, Timings

__all__ = [
    "Chunk", "Context", "FinishReason", "GenerationOptions", "LoadedModel", "Result", "Sampler",
    "SamplingOptions", "TextStream", "Timings", "filtered_logits", "generate", "load", "stream", "tokens",
]  # fmt: skip


def stream(loaded: LoadedModel, prompt: str | Sequence[int], **options: Any) -> TextStream:
    """Continue `prompt`; iterate over the Chunks as they come. `.result` of what is returned is the whole.

    A prompt in ids is taken as it is; text is encoded with the tokenizer's special tokens (usually BOS in
    front) and never parsed for any. `options` are the fields of GenerationOptions.
    Raises GenerationError before anything is computed: an empty prompt, one longer than the context,
    settings that can't work.
    """
    settings = GenerationOptions.of(**options)
    if isinstance(prompt, str):
        if not prompt:
            raise GenerationError("the prompt is empty", "some text to continue")
        prompt = loaded.tokenizer.encode(prompt)
    return TextStream(loaded, prompt, settings)


def generate(loaded: LoadedModel, prompt: str | Sequence[int], **options: Any) -> Result:
    """Continue `prompt` to the end. Arguments and errors are those of `stream`."""
    text = stream(loaded, prompt, **options)
    for _ in text:
        pass
    return text.result


class _CallableModule(types.ModuleType):
    """Python binds `mlxlm.generate` to this package as soon as anything imports it, over the function of
    the same name in `mlxlm`. Calling the package is calling the function, so that both orders work."""

    def __call__(self, loaded: LoadedModel, prompt: str | Sequence[int], **options: Any) -> Result:
        return generate(loaded, prompt, **options)


sys.modules[__name__].__class__ = _CallableModule
