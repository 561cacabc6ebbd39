"""mlxlm: train, quantize and chat with language models on Apple silicon, with MLX.

Examples:
    >>> import mlxlm
    >>> lm = mlxlm.load("small-world")  # or a name, path or hub id in place of `lm` below
    >>> print(mlxlm.generate(lm, "Once upon a time", max_tokens=50).text)
    >>> for chunk in mlxlm.stream(lm, "Once upon a time"):
    ...     print(chunk.text, end="")
    >>> for result in mlxlm.batch(lm, ["Once upon a time", "In a dark wood"], num_samples=2):
    ...     print(result.text)
    >>> print(mlxlm.generate(lm, messages=[{"role": "user", "content": "What is a list?"}]).text)
    >>> print(mlxlm.Chat(lm, system_prompt="You are brief.").ask("Hello!").text)
    >>> print(mlxlm.score(lm, "Once upon a time").bits_per_byte)
    >>> print(mlxlm.embed(lm, ["a cat", "a kitten"]).shape)
    >>> print(mlxlm.plan("15m", batch_size=16, max_seq_length=512).memory.total)

Importing mlxlm doesn't import MLX, which the first call does. On Linux it loads the BLAS library for MLX.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlxlm.backend import blas
from mlxlm.utils import errors

if TYPE_CHECKING:
    from mlxlm.chat.generate import batch, batch_as_completed, generate, stream
    from mlxlm.chat.session import Chat
    from mlxlm.generation import embed, hidden_states, load, score
    from mlxlm.plan.planner import plan

__version__ = "0.1.0"
__all__ = [
    "Chat", "batch", "batch_as_completed", "embed", "generate", "hidden_states", "load", "plan", "score", "stream",
]  # fmt: skip

# Takes a millisecond. Here, so that a later `import mlx.core` uses this BLAS; an error is raised with the first use of
# MLX, where a command can show it.
with suppress(errors.PlatformError):
    blas.load_blas()


def __getattr__(name: str) -> Any:
    if name == "Chat":
        from mlxlm.chat.session import Chat

        return Chat
    if name == "plan":  # a callable package
        return import_module("mlxlm.plan")
    if name in ("batch", "batch_as_completed", "generate", "stream"):
        from mlxlm.chat import generate

        return getattr(generate, name)
    if name in __all__:
        from mlxlm import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'mlxlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__", "errors"]
