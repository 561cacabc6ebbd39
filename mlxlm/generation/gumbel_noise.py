"""Seeds, and the noise that decides a draw: a function of the seed and of a token's number alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from mlxlm.backend.mlx import mx


def random_seed() -> int:
    """A seed from the operating system, short enough to be typed again."""
    return int.from_bytes(os.urandom(4), "little")


def derive_seed(seed: int, id: str, sample: int) -> int:
    """The seed of a request's n-th sample: a hash of all three, so that no two share one by accident.

    It has 53 bits: jq 1.6 and JavaScript take a longer number of a line of results for another one.
    """
    content = f"{seed}\n{sample}\n{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 11


def token_noise(seed: int, step: int) -> tuple[tuple[int, int], float]:
    """What belongs to the draw of token number `step`: a key for `gumbel_noise`, and a number of [0, 1)."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8)]
    return (words[0], words[1]), words[2] / 2**32


def gumbel_noise(keys: Sequence[tuple[int, int]], size: int) -> mx.array:
    """Independent draws of Gumbel's distribution, float32 `[len(keys), size]`; row i depends on `keys[i]` alone.

    Models that pad one vocabulary to sizes a little apart (a draft model beside its target) get the same noise for
    the same token.

    Exponentials come from -log(1 - u), as float32 has 256 times finer steps of u near 0 than near 1: with
    -log(u), what `mx.random.gumbel_noise` takes, tokens of less than 1e-8 could hardly win, and a tail of
    100,000 of them together would be short of 0.1 %.
    """
    step = 1 << max(size.bit_length() - 4, 0)  # at most an eighth more numbers than needed
    padded = -(-size // step) * step
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(padded,), key=key))(mx.array(keys, mx.uint32))
    return -mx.log(_exponential(mx.maximum(uniform[:, :size], 2.0**-33)))


def _exponential(u: mx.array) -> mx.array:
    """-log(1 - u) for 0 < u < 1, to 2e-7 relative (Kahan's log1p).

    `mx.log1p` isn't vectorised on a CPU: 8 ns a number, and a logarithm 2.
    """
    rest = 1 - u
    missing = 1 - rest  # u as it was rounded, exactly
    return mx.where(missing == 0, u, mx.log(rest) * (-u / missing))
