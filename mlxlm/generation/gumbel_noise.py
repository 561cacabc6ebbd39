"""Seeds, and the noise of a draw, which depends on the seed and the number of the token alone."""

from __future__ import annotations

import hashlib
import os

from mlxlm.backend.mlx import mx


def random_seed() -> int:
    """A random seed from the operating system, short enough to be typed again."""
    return int.from_bytes(os.urandom(4), "little")


def derive_seed(seed: int, id: str, sample: int) -> int:
    """The seed of sample number `sample` of request `id`: a hash of all three, so that no two share one by accident.

    It has 53 bits, since jq 1.6 and JavaScript round longer integers.
    """
    content = f"{seed}\n{sample}\n{id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 11


def token_noise(seed: int, step: int) -> tuple[tuple[int, int], float]:
    """The randomness of token number `step`: a key for `negative_gumbel_noise`, and a uniform number in [0, 1)."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8)]
    return (words[0], words[1]), words[2] / 2**32


def negative_gumbel_noise(keys: mx.array, size: int) -> mx.array:
    """Independent Gumbel noise times -1, float32 `[R, size]`; row i depends on row i of keys `[R, 2]`, uint32, alone.

    It is to be subtracted: with a negation, it would be one more operation than `mx.compile` fuses.

    Models that pad one vocabulary to slightly different sizes (a draft model and its target) get the same noise for
    the same token.

    Exponentials are -log(1 - u), since float32 has 256 times finer steps of u near 0 than near 1. With -log(u), as in
    `mx.random.gumbel`, tokens of probability below 1e-8 could hardly win, and 100,000 of them together would be drawn
    0.1 % too rarely.
    """
    step = 2 << max(size.bit_length() - 5, 0)  # at most 1/8 more numbers than needed
    padded = -(-size // step) * step
    # The bits that `mx.random.uniform` starts from: converted here, after slicing, `mx.compile` fuses all of it.
    bits = mx.vmap(lambda key: mx.random.split(key, padded // 2))(keys).reshape(len(keys), padded)[:, :size]
    uniform = mx.minimum(bits.astype(mx.float32) * 2.0**-32, 1 - 2.0**-24)
    return mx.log(_exponential(mx.maximum(uniform, 2.0**-33)))


def _exponential(u: mx.array) -> mx.array:
    """-log(1 - u) for 0 < u < 1, to 2e-7 relative (Kahan's log1p).

    `mx.log1p` isn't vectorized on a CPU: 8 ns per number, against 2 for `mx.log`.
    """
    complement = 1 - u
    rounded = 1 - complement  # exact
    return mx.where(rounded == 0, u, mx.log(complement) * (-u / rounded))
