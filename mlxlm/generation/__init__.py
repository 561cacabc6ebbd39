"""Text generation: load a model, generate or stream a text, generate a batch, score a text.

lm = load("runs/stories")
print(generate(lm, "Once upon a time", temperature=0.8, seed=1).text)
for chunk in stream(lm, "Once upon a time"):
    print(chunk.text, end="")
for result in batch(lm, ["Once", "Twice"], num_samples=4):
    print(result.text)
"""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.generation.context import Context
    from mlxlm.generation.decoding import greedy_tokens
    from mlxlm.generation.engine import Engine, EngineStats, QueueFullError, get_engine
    from mlxlm.generation.generation_config import GenerationConfig
    from mlxlm.generation.loaded_model import LoadedModel, load
    from mlxlm.generation.logit_filters import filter_logits
    from mlxlm.generation.options import GenerationOptions
    from mlxlm.generation.request import Request
    from mlxlm.generation.result import FinishReason, GenerationChunk, GenerationResult, Timings
    from mlxlm.generation.sampling import Sampler
    from mlxlm.generation.scoring import Score, score
    from mlxlm.generation.text_generation import batch, generate, run_batch, stream
    from mlxlm.generation.text_stream import TextStream

__all__ = [
    "GenerationChunk",
    "Context",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerationConfig",
    "GenerationOptions",
    "LoadedModel",
    "QueueFullError",
    "Request",
    "GenerationResult",
    "Sampler",
    "Score",
    "TextStream",
    "Timings",
    "batch",
    "filter_logits",
    "generate",
    "get_engine",
    "greedy_tokens",
    "load",
    "run_batch",
    "score",
    "stream",
]
__getattr__ = lazy_exports(__name__)
