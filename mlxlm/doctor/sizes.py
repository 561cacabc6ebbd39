"""How much `mlxlm doctor --full` runs: one or two minutes on a CPU, more on a GPU, which has more kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PRESETS = ("0.3m", "1m", "5m", "15m", "50m", "110m", "280m", "1b")
BUNDLED_MODEL = "small-world"

# What presets don't have, but models of `families/` do: other head dims, a sliding window, a soft cap, ALiBi, norms of
# queries and keys, RoPE of a part of the dimensions and with other wavelengths.
_HEAD_DIMS: tuple[dict[str, Any], ...] = tuple({"head_dim": dim} for dim in (48, 80, 96, 112, 128, 256))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"sliding_window": 100},
    {"attn_logit_softcapping": 30.0},
    {"positions": "alibi"},
    {"qk_norm": "head"},
    {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"head_dim": 80, "sliding_window": 100, "attn_logit_softcapping": 30.0},
)


@dataclass(frozen=True)
class KernelModel:
    """A model at whose shapes kernels are checked.

    Args:
        name: Of a preset or a model.
        dtype: Of generation; training has that of the device.
        changes: Fields of its configuration.
    """

    name: str
    dtype: str
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The sizes of all checks.

    Args:
        kernel_models: Models at whose shapes kernels are checked.
        ragged: Check with the shapes of the check on first use only, instead of the model's.
        benchmark_models: Models at whose largest shapes implementations are timed.
        repeats: Timings per implementation.
        training: Preset to train, and its changes.
        settings: Of its training: steps, batch_size, max_seq_length.
        stop_after: Steps after which it is stopped and resumed.
        decoding: Preset to decode with, and its changes; its weights are random.
        prompt: Tokens of the prompt.
        tokens: Tokens to decode.
        questions: Of each kind, to the bundled model.
        matrix: Rows and columns of the matrices whose product is timed.
    """

    kernel_models: tuple[KernelModel, ...]
    benchmark_models: tuple[KernelModel, ...]
    repeats: int
    training: tuple[str, dict[str, Any]]
    settings: dict[str, int]
    stop_after: int
    decoding: tuple[str, dict[str, Any]]
    prompt: int
    tokens: int
    questions: int
    matrix: int
    ragged: bool = False


def _variants(dtype: str, changes: tuple[dict[str, Any], ...]) -> tuple[KernelModel, ...]:
    return tuple(KernelModel("1m", dtype, fields) for fields in changes)


GPU = Sizes(
    kernel_models=(
        *(KernelModel(name, "bfloat16") for name in PRESETS),
        KernelModel(BUNDLED_MODEL, "float16"),
        KernelModel("15m", "float32"),
        *_variants("bfloat16", _HEAD_DIMS + _OPTIONS),
    ),
    benchmark_models=(
        *(KernelModel(name, "bfloat16") for name in ("15m", "110m", "1b")),
        KernelModel("1b", "bfloat16", {"qk_norm": "head"}),
    ),
    repeats=5,
    # From 1,024 tokens on, attention has a kernel of its own for training.
    training=("15m", {"vocab_size": 1024}),
    settings={"steps": 20, "batch_size": 4, "max_seq_length": 1024},
    stop_after=8,
    decoding=("280m", {}),
    prompt=512,
    tokens=256,
    questions=5,
    matrix=4096,
)
CPU = Sizes(
    kernel_models=(KernelModel(BUNDLED_MODEL, "float32"), *_variants("float32", _OPTIONS)),
    benchmark_models=(KernelModel("0.3m", "float32"),),
    repeats=3,
    training=("0.3m", {"vocab_size": 1024}),
    settings={"steps": 12, "batch_size": 8, "max_seq_length": 128},
    stop_after=5,
    decoding=("15m", {}),
    prompt=128,
    tokens=64,
    questions=2,
    matrix=1024,
)
