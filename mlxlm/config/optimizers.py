"""The optimizers by name: default hyperparameters, size of the state, and the MLX class that computes the update.

Plain declarations without MLX, so that the planner, the settings and the command line read the same entry.
`mlxlm.train.optimizers` builds an optimizer from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxlm.config.counts import count_parameters, sublayers
from mlxlm.config.model_config import ModelConfig

# Of a matrix; where rows are shorter, as in short convolutions, `optimizer_state` changes nothing.
MIN_ROW = 16


@dataclass(frozen=True)
class OptimizerSpec:
    """What the name of an optimizer stands for.

    Attributes:
        mlx_class: Class of `mlx.optimizers`, for all parameters that `layer_matrices` doesn't update.
        averages: Running averages that the optimizer keeps, each as large as the parameters. 0: only sums over the rows
            and the columns of matrices, and one average of vectors.
        weight_decay: Default decoupled weight decay.
        beta1: Default decay of the average of gradients.
        beta2: Default decay of the average of squared gradients (Lion: of the momentum). None if the optimizer has no
            betas to choose.
        lr_scale: Default peak learning rate as a multiple of AdamW's.
        min_lr: Smallest default peak learning rate.
        many_epochs: With more epochs than these, the text is memorized, and the default weight decay is ten times as
            much.
        arguments: Further arguments of the class.
        layer_matrices: The optimizer of the layers' matrices, if it is another one: "muon", which has one average.
    """

    mlx_class: str
    averages: int
    weight_decay: float
    beta1: float
    beta2: float | None
    lr_scale: float = 1.0
    min_lr: float = 0.0
    many_epochs: float = 16
    arguments: Mapping[str, Any] = field(default_factory=dict)
    layer_matrices: str | None = None


# Measured, one run each: the last tenth of tinyshakespeare after 400 steps of 1,024 tokens, 0.2M parameters. AdamW at
# 0.008 gives 2.504 bits per byte, Muon at 0.008 2.503 and at 0.016 2.489. A Muon step took a third to a half more
# processor time.
OPTIMIZERS: dict[str, OptimizerSpec] = {
    # 0.1 and 0.95 are GPT-3's: 0.999 averages over longer than a short run lasts (Brown et al. 2020, appendix B).
    "adamw": OptimizerSpec("AdamW", 2, 0.1, 0.9, 0.95, arguments={"bias_correction": True}),
    # Its updates are as large as AdamW's, so rate and decay carry over (Liu et al. 2025, 2.2). The betas are those of
    # AdamW, which updates embeddings, head and vectors (Jordan et al. 2024).
    "muon": OptimizerSpec(
        "AdamW", 2, 0.1, 0.9, 0.95, many_epochs=5, arguments={"bias_correction": True}, layer_matrices="muon"
    ),
    # A sign is larger than an AdamW update: 3 to 10 times less rate, as much more decay; betas for language models
    # (Chen et al. 2023, 5). Measured as above: a tenth of AdamW's rate 2.66 bits per byte, a fifth 2.75, a twentieth
    # 2.90.
    "lion": OptimizerSpec("Lion", 1, 0.5, 0.95, 0.98, lr_scale=0.1),
    # Rates are relative to the size of a weight: 0.01 (Shazeer & Stern 2018, 8), which is too little for a small
    # model. Measured as above: 2.82 bits per byte with 0.01, 2.54 with 0.04. No momentum and no decay, as in T5.
    "adafactor": OptimizerSpec(
        "Adafactor", 0, 0.0, 0.0, None, lr_scale=5.0, min_lr=0.01, arguments={"relative_step": False}
    ),
}


STATE_DTYPES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}  # bytes per element, and per row of a matrix


def optimizer_bytes(config: ModelConfig, optimizer: str, dtype: str = "float32") -> int:
    """Return the bytes of the state of an optimizer, whose averages of matrices are stored in `dtype`.

    What `dtype` is for matrices with rows shorter than MIN_ROW isn't considered: they are few.
    """
    spec, groups, hidden = OPTIMIZERS[optimizer], count_parameters(config), config.hidden_size
    tables = [(groups[name] // hidden, hidden) for name in ("embedding", "positions", "head") if groups[name]]
    if width := config.per_layer_width:
        tables += [(groups["per_layer_embedding"] // width, width), (width, hidden)]
    layers = [
        (count * matrix.experts, matrix.outputs, matrix.inputs)
        for sublayer, count in sublayers(config)
        for matrix in sublayer.matrices
    ]
    vectors = groups["norms"] + groups["biases"]
    if not spec.averages:
        return 4 * (vectors + sum(map(sum, tables)) + sum(n * (rows + columns) for n, rows, columns in layers))
    element, row = STATE_DTYPES[dtype]
    bytes_of_tables = sum(rows * (columns * element + row) for rows, columns in tables)
    bytes_of_layers = sum(n * rows * (columns * element + row) for n, rows, columns in layers)
    of_layers = 1 if spec.layer_matrices == "muon" else spec.averages
    return spec.averages * (4 * vectors + bytes_of_tables) + of_layers * bytes_of_layers
