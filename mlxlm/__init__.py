"""mlxlm: train, quantize and chat with language models on Apple silicon, with MLX.

    import mlxlm

    loaded = mlxlm.load("my-model")
    print(mlxlm.generate(loaded, "Once upon a time", max_tokens=50).text)
    for chunk in mlxlm.stream(loaded, "Once upon a time"):
        print(chunk.text, end="")

Importing this imports nothing else: MLX comes with the first call.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxlm.generation import generate, load, stream

__all__ = ["generate", "load", "stream"]


def __getattr__(name: str):
    if name in __all__:
        from mlxlm import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'mlxlm' has no attribute {name!r}")
