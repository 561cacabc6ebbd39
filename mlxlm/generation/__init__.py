"""Generation: prefill a prompt, decode token by token, stream text.

`mlxlm.load`, `mlxlm.generate` and `mlxlm.stream` are those of this package:

    loaded = load("runs/stories")
    print(generate(loaded, "Once upon a time", temperature=0.8, seed=1).text)
    for chunk in stream(loaded, "Once upon a time"):
        print(chunk.text, end="")
"""

from collections.abc import Sequence
from typing import Any

from mlxlm.errors import GenerationError
from mlxlm.generation.engine import Context, tokens
from mlxlm.generation.loaded import LoadedModel, load
from mlxlm.generation.sampling import Sampler, SamplingOptions, filtered_logits
from mlxlm.generation.text import Chunk, FinishReason, GenerationOptions, Result, TextStream, Timings

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
