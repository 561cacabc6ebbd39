"""mlxlm: train, quantize and chat with language models on Apple silicon, with MLX.

    import mlxlm

    loaded = mlxlm.load("my-model")
    print(mlxlm.generate(loaded, "Once upon a time", max_tokens=50).text)
    for chunk in mlxlm.stream(loaded, "Once upon a time"):
        print(chunk.text, end="")
    for result in mlxlm.batch(loaded, ["Once upon a time", "In a dark wood"], num_samples=2):
        print(result.text)
    print(mlxlm.score(loaded, "Once upon a time").bits_per_byte)
    print(mlxlm.plan("15m", batch_size=16, max_seq_length=512).memory.total)

Importing this doesn't import MLX, which comes with the first call; on Linux it loads the BLAS that MLX is to use.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from mlxlm.backend import blas
from mlxlm.utils import errors

if TYPE_CHECKING:
    from mlxlm import plan
    from mlxlm.chat.session import Chat
    from mlxlm.generation import batch, generate, load, score, stream

__version__ = "0.1.0"
__all__ = ["Chat", "batch", "generate", "load", "plan", "score", "stream"]

# A millisecond: here, so that `import mlx.core` after this line finds the BLAS. The error of a BLAS that
# can't be loaded comes with the first use of MLX, where a command can show it.
with suppress(errors.PlatformError):
    blas.load_blas()


def __getattr__(name: str):
    if name == "Chat":
        from mlxlm.chat.session import Chat

        return Chat
    if name == "plan":  # the package, which can be called
        return import_module("mlxlm.plan")
    if name in __all__:
        from mlxlm import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'mlxlm' has no attribute {name!r}")
