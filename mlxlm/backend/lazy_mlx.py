"""`mx`, which imports MLX when it is first used: for files that declare options, which `--help` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["mx"]

if TYPE_CHECKING:
    from mlxlm.backend.mlx import mx
else:

    class _LazyMLX:
        def __getattr__(self, name: str) -> Any:
            from mlxlm.backend.mlx import mx

            return getattr(mx, name)

    mx = _LazyMLX()
