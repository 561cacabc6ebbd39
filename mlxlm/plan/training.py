"""The training settings that decide time and memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from mlxlm.backend.device import num_batch_shards
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.config.counts import attended_keys, attention_windows
from mlxlm.config.optimizers import OPTIMIZERS, STATE_DTYPES
from mlxlm.config.option import option, range_problems
from mlxlm.kernels.attention import LINEAR_MEMORY_FROM, TRAINING, attention_case
from mlxlm.kernels.blockwise_attention import BLOCK_BYTES, block_rows
from mlxlm.kernels.cross_entropy import chunk_rows
from mlxlm.kernels.dispatch import Case, choose_path
from mlxlm.kernels.mlx_attention import MIN_ROWS
from mlxlm.utils.errors import ConfigError

DTYPES = {"float32": 4, "bfloat16": 2}  # bytes per element
ATTENTION = ("plain", "blockwise", "fused")
DEVICES = ("cpu", "metal", "cuda")
THIS_DEVICE = "cpu" if ON_CPU else "metal" if mx.metal.is_available() else "cuda"


@dataclass(frozen=True)
class Training:
    """Training settings. Fields have the names of `mlxlm.train.TrainSettings`.

    Raises:
        ConfigError: A field has a value that can't work. The message names all of them.
    """

    batch_size: int = option(16, "Sequences per forward pass.", low=1)
    max_seq_length: int = option(256, "Tokens per sequence.", low=1)
    grad_accumulation_steps: int = option(1, "Forward passes per optimizer step.", low=1)
    optimizer: str = option("adamw", "Optimizer.", choices=tuple(OPTIMIZERS))
    ema_decay: float = option(0.0, "Decay of the averaged weights (EMA). 0: none.", low=0, below=1)
    dtype: str = option("float32", "Of matrix products and activations.", choices=tuple(DTYPES))
    param_dtype: str = option("float32", "Of weights.", choices=tuple(DTYPES))
    optimizer_state: str = option("float32", "Of the optimizer's averages.", choices=tuple(STATE_DTYPES))
    grad_checkpoint: bool = option(False, "Recompute each layer's activations in the backward pass.")
    attention: str | None = option(
        None,
        '"plain" keeps the probabilities `[B, H, T, T]` for the gradient, "blockwise" and "fused" recompute them. '
        "None: what training chooses on the device.",
        choices=ATTENTION,
    )
    device: str | None = option(None, "Device that trains. None: this machine's.", choices=DEVICES)

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise ConfigError("invalid training settings: " + "; ".join(problems))

    @classmethod
    def from_settings(cls, settings: Any) -> Training:
        """Take the fields from a `mlxlm.train.TrainSettings`."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**values)

    @property
    def num_workers(self) -> int:
        """Number of CPU cores that share the rows of a batch, each with its own gradients. 1 on a GPU."""
        return num_batch_shards(self.batch_size) if self._device == "cpu" else 1

    def attention_path(self, config: ModelConfig) -> str:
        """Return the attention implementation: `attention`, or what training chooses on the device."""
        if self.attention:
            return self.attention
        choose = _path_on_this_device if self._device == THIS_DEVICE else _path_on_other_device
        return choose(config, self)

    def loss_rows(self, vocab_size: int) -> int:
        """Return the rows of logits that exist at a time, in each worker."""
        rows = -(-self.batch_size // self.num_workers) * self.max_seq_length
        return min(chunk_rows(vocab_size, self._cpu_or_gpu), rows)

    def block_rows(self, heads: int, window: int | None = None) -> int:
        """Return the query rows whose scores blockwise attention holds at a time, in each worker."""
        length, rows = self.max_seq_length, -(-self.batch_size // self.num_workers)
        return min(length, block_rows(length, length, heads * rows, window, BLOCK_BYTES[self._cpu_or_gpu]))

    def keys_computed(self, config: ModelConfig) -> float:
        """Return the keys that attention computes scores for per query, averaged over rows and layers.

        A block of rows computes all keys that any of its rows attends to. On a GPU, "plain" computes the whole square,
        and the fused kernels are counted with the whole window. "plain" also keeps these scores.
        """
        path, length, layers = self.attention_path(config), self.max_seq_length, config.num_hidden_layers
        windows = attention_windows(config)
        if path == "fused":
            return sum(attended_keys(config, length)) / layers
        if path == "plain" and self._device != "cpu":
            return length * len(windows) / layers

        def scores(window: int | None) -> int:
            plain = max(MIN_ROWS, -(-length // 4))
            rows = plain if path == "plain" else self.block_rows(config.num_attention_heads, window)
            full, rest = divmod(length, rows)  # blocks, and rows of the last one
            most = rows + (window or length) - 1  # keys of a block; the first ones have fewer before them
            growing = min(full, most // rows)
            keys = rows * growing * (growing + 1) // 2 + (full - growing) * most
            return rows * keys + rest * min(length, rest + (window or length) - 1)

        return sum(count * scores(window) for window, count in Counter(windows).items()) / (layers * length)

    @property
    def _device(self) -> str:
        return self.device or THIS_DEVICE

    @property
    def _cpu_or_gpu(self) -> str:
        return "cpu" if self._device == "cpu" else "gpu"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step on one device."""
        return self.batch_size * self.max_seq_length * self.grad_accumulation_steps


def updated_at_once(parameters: int, device: str = THIS_DEVICE) -> int:
    """Return the number of parameters of a group that is updated at a time, unless a single matrix has more.

    Its intermediate results need memory, and on a GPU the host waits for each group.
    """
    return max(1 << 20 if device == "cpu" else 1 << 24, parameters // 32)


def _path_on_this_device(config: ModelConfig, training: Training) -> str:
    """Ask the kernel dispatcher, which knows `$MLXLM_KERNELS` and the measurements of this machine."""
    path = choose_path(TRAINING, _case(config, training)).path
    if path == "mlx":
        return "fused" if _fused_by_mlx(training) else "plain"
    return "fused" if path == "metal" else path


def _path_on_other_device(config: ModelConfig, training: Training) -> str:
    """Return what `mlxlm.kernels.attention` prefers on another device, where nothing was measured.

    MLX's attention has no gradient with ALiBi, soft-capping or sinks, and keeps the probabilities except in CUDA's
    fused gradient.
    """
    if config.positions == "alibi" or config.attn_logit_softcapping is not None or config.attention_sinks:
        return "blockwise"
    if training.max_seq_length < LINEAR_MEMORY_FROM:
        return "plain"
    return "fused" if _fused_by_mlx(training) and config.v_head_dim in (None, config.head_dim) else "blockwise"


def _case(config: ModelConfig, training: Training) -> Case:
    """The case of the layers without a window, if there are any: their attention may need the most memory."""
    used = {"softcap": config.attn_logit_softcapping, "slopes": config.positions == "alibi" or None}
    used["sinks"] = config.attention_sinks or None
    features, length = tuple(name for name, x in used.items() if x is not None), training.max_seq_length
    layers = [i for i, (mixer, *_) in enumerate(config.layer_sublayers) if any(mixer.score_flops)]
    layer = min(layers, key=lambda i: config.window(i) is not None)
    head_dim, window = config.layer_head_dim(layer), config.window(layer)
    sizes = head_dim, config.num_attention_heads, config.layer_kv_heads(layer), length, length
    values = {} if config.v_head_dim in (None, head_dim) else {"V": config.v_head_dim}
    return attention_case(TRAINING, training.dtype, *sizes, features, window=window, **values)


def _fused_by_mlx(training: Training) -> bool:
    long = training.max_seq_length >= LINEAR_MEMORY_FROM
    return training._device == "cuda" and training.dtype != "float32" and long
