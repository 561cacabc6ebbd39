"""Text generation: engines, sampling, and scores of texts. `mlxlm.generate`, `stream` and `batch` use an engine."""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.generation.context import Context
    from mlxlm.generation.decoding import greedy_tokens
    from mlxlm.generation.embedding import embed, hidden_states
    from mlxlm.generation.engine import (
        Engine,
        EngineStats,
        QueueFullError,
        get_engine,
        run_batch,
    )
    from mlxlm.generation.loaded_model import GenerationConfig, LoadedModel, load
    from mlxlm.generation.options import GenerationOptions
    from mlxlm.generation.request import Request
    from mlxlm.generation.result import FinishReason, GenerationChunk, GenerationResult, Timings
    from mlxlm.generation.sampling import Sampler
    from mlxlm.generation.scoring import Score, score
    from mlxlm.generation.text import TextStream

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
    "embed",
    "get_engine",
    "greedy_tokens",
    "hidden_states",
    "load",
    "run_batch",
    "score",
]
__getattr__ = lazy_exports(__name__)
