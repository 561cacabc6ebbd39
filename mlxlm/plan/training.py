"""How a model would be trained, as far as work and memory depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxlm.backend.cpu_cores import num_batch_shards
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.config import ModelConfig, counts
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.kernels import flash_attention
from mlxlm.kernels.attention_dispatch import LINEAR_MEMORY_FROM, TRAINING, attention_case
from mlxlm.kernels.blockwise_attention import BLOCK_BYTES, block_rows
from mlxlm.kernels.cross_entropy import chunk_rows
from mlxlm.kernels.dispatch import choose_path
from mlxlm.kernels.mlx_attention import MIN_ROWS
from mlxlm.utils.errors import ConfigError

DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of a number
ATTENTION = ("plain", "blockwise", "fused")
DEVICES = ("cpu", "metal", "cuda")
MAX_COUNT = 1 << 53  # of anything that is counted here
THIS_DEVICE = "cpu" if ON_CPU else "metal" if mx.metal.is_available() else "cuda"


@dataclass(frozen=True)
class Training:
    """Fields as in `mlxlm.train.TrainSettings`. `dtype`: of the products and activations; weights, gradients and
    optimizer are float32. `ema_decay`: decay of the averaged weights, 0 for none. `attention`: "plain" keeps the
    probabilities `[B, H, T, T]` for the gradient, "blockwise" and "fused" compute them again (None: as training
    chooses). `loss_chunk_size`: rows of logits that exist at a time (None: as training chooses, 0: all of them).
    `device`: what trains, which decides what training chooses (None: this machine's).

    Raises ConfigError naming every field that can't work.
    """

    batch_size: int = 16
    max_seq_length: int = 256
    grad_accumulation_steps: int = 1
    optimizer: str = "adamw"
    ema_decay: float = 0.0
    dtype: str = "float32"
    grad_checkpoint: bool = False
    attention: str | None = None
    loss_chunk_size: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if found := list(self._problems()):
            raise ConfigError("this training can't be planned: " + "; ".join(found))

    @classmethod
    def of(cls, settings: Any) -> Training:
        """As `mlxlm.train.TrainSettings` have it."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**values)

    def _problems(self) -> Iterator[str]:
        for name, least in (
            ("batch_size", 1),
            ("max_seq_length", 1),
            ("grad_accumulation_steps", 1),
            ("loss_chunk_size", 0),
        ):
            value = getattr(self, name)
            if name == "loss_chunk_size" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MAX_COUNT:
                yield f"{name} is {value!r}, it must be a whole number from {least} to {MAX_COUNT - 1:,}"
        if (
            isinstance(self.ema_decay, bool)
            or not isinstance(self.ema_decay, int | float)
            or not 0 <= self.ema_decay < 1
        ):
            yield f"ema is {self.ema_decay!r}, it must be 0 or above, and below 1"
        for name, allowed in (
            ("optimizer", OPTIMIZERS), ("dtype", tuple(DTYPES)), ("attention", (None, *ATTENTION)),
            ("device", (None, *DEVICES)),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                yield f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(filter(None, allowed))}"

    @property
    def parts(self) -> int:
        """Cores that a batch's rows are shared out to, each with gradients of its own; a GPU takes all of them."""
        return num_batch_shards(self.batch_size) if self._on == "cpu" else 1

    def path(self, config: ModelConfig) -> str:
        """Of attention: as it is asked for, or as training on the device chooses for this model and length."""
        if self.attention:
            return self.attention
        return _path_here(config, self) if self._on == THIS_DEVICE else _path_elsewhere(config, self)

    def loss_rows(self, vocab_size: int) -> int:
        """Rows of logits that exist at a time, in each of the parts."""
        rows = -(-self.batch_size // self.parts) * self.max_seq_length
        chosen = chunk_rows(vocab_size, self._kind)
        return min(chosen if self.loss_chunk_size is None else self.loss_chunk_size or rows, rows)

    def block_rows(self, heads: int, window: int | None = None) -> int:
        """Query rows of which blockwise attention has the scores at a time, in each of the parts."""
        length, rows = self.max_seq_length, -(-self.batch_size // self.parts)
        reach = min(length, length // 8 + (window or length))
        return min(length, block_rows(length, heads * rows, reach, BLOCK_BYTES[self._kind]))

    def keys_computed(self, config: ModelConfig) -> float:
        """Keys of a row of scores that our own attention computes and, if the path is "plain", keeps, in the mean over
        rows and layers: a block of rows has all keys that any of them sees. A GPU's "plain" has the whole square, its
        fused kernels are counted with the whole window."""
        path, length, layers = self.path(config), self.max_seq_length, config.num_hidden_layers
        if path == "fused":
            return counts.attended_keys(config, length) / layers
        if path == "plain" and self._on != "cpu":
            return length

        def scores(window: int | None) -> int:
            plain = max(MIN_ROWS, -(-length // 4))
            rows = plain if path == "plain" else self.block_rows(config.num_attention_heads, window)
            blocks = [(start, min(start + rows, length)) for start in range(0, length, rows)]
            return sum((end - start) * min(end, end - start + (window or length) - 1) for start, end in blocks)

        windows = Counter(map(config.window, range(layers)))
        return sum(count * scores(window) for window, count in windows.items()) / (layers * length)

    @property
    def _on(self) -> str:
        return self.device or THIS_DEVICE

    @property
    def _kind(self) -> str:
        return "cpu" if self._on == "cpu" else "gpu"

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.max_seq_length * self.grad_accumulation_steps

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _path_here(config: ModelConfig, training: Training) -> str:
    """What the dispatcher takes on this machine, `$MLXLM_KERNELS` and what was measured here included."""
    window = next((w for w in map(config.window, range(config.num_hidden_layers)) if w is not None), None)
    slopes = True if config.positions == "alibi" else None
    length, softcap = training.max_seq_length, config.attn_logit_softcapping
    sizes = (config.head_dim, config.num_attention_heads, config.num_key_value_heads, length, length)
    case = attention_case(TRAINING, training.dtype, *sizes, window, softcap, slopes)
    path = choose_path(TRAINING, case).path
    if path == "mlx":
        return "fused" if _fused_by_mlx(training) else "plain"
    return "fused" if path == "metal" else path


def _path_elsewhere(config: ModelConfig, training: Training) -> str:
    """What `attention_paths` prefers there: MLX's own has neither ALiBi nor a soft cap, and keeps the probabilities
    unless CUDA's fused gradient serves; ours on Metal takes head dims in eights."""
    special = config.positions == "alibi" or config.attn_logit_softcapping is not None
    if special:
        return "blockwise"
    if training.max_seq_length < LINEAR_MEMORY_FROM:
        return "plain"
    if training.device == "metal":
        kernel = config.head_dim % 8 == 0 and config.head_dim <= flash_attention.MAX_HEAD_DIM
        return "fused" if kernel else "blockwise"
    return "fused" if _fused_by_mlx(training) else "blockwise"


def _fused_by_mlx(training: Training) -> bool:
    long = training.max_seq_length >= LINEAR_MEMORY_FROM
    return training._on == "cuda" and training.dtype != "float32" and long
