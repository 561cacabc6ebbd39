"""Importance weights for GGUF files: how large the inputs of each column are, llama.cpp's importance matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import limit_buffer_cache, mx, nn
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.convert.verify import Progress
from mlxlm.quantize.calibrate import ExpertInputs, calibrate_layers, get_submodule, recording
from mlxlm.quantize.calibration_text import CALIBRATION_TOKENS, WINDOW_TOKENS, text_of_file
from mlxlm.quantize.layers import layers_of
from mlxlm.utils.errors import CheckpointError


def importance_weights(
    source: Path | str,
    calibration_text: Path | str,
    *,
    adapter: Path | str | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, np.ndarray]:
    """Run a text through a model, to round the weights that matter for it with smaller errors.

    Args:
        source: Whatever `open_checkpoint` opens.
        calibration_text: A text file, ideally like what the model will read; 16,384 tokens of it are used.
        adapter: Folder or hub id of an adapter that is merged into the weights.
        progress: Called as `progress(phase, done, total)`.

    Returns:
        Module -> the mean square of each column's input, float32 `[width]` or for experts `[experts, width]`:
        `importance` of `mlxlm.convert.convert`.

    Raises:
        ArgumentError: The model's layers can't be calibrated.
        CheckpointError: The weights are not finite.
        DataError: The text is too short.
    """
    checkpoint = open_module_checkpoint(source, adapter)
    text = text_of_file(calibration_text, checkpoint.load_tokenizer(), 16 * CALIBRATION_TOKENS)
    windows = text.windows(min(WINDOW_TOKENS, checkpoint.config.max_position_embeddings), CALIBRATION_TOKENS)
    model, finished = layers_of(checkpoint), itertools.count(1)
    result: dict[str, np.ndarray] = {}

    def on_layer(name: str, layer: nn.Module, run: Callable[[], mx.array], _: Mapping[str, mx.array]) -> mx.array:
        with recording(layer, diagonal=True) as inputs:
            output = run()
            mx.eval(output)
        for matrix, stats in inputs.items():
            if isinstance(stats, ExpertInputs):
                squares = stats.mean_squares(get_submodule(layer, matrix).num_experts)
            else:
                squares = stats.moments / windows.size
            if not np.isfinite(squares).all():
                raise CheckpointError(f"the inputs of {name}.{matrix} are not finite on {text.name}", "another text")
            result[f"{name}.{matrix}"] = squares
        progress("calibrating", next(finished), len(model.names))
        return output

    with limit_buffer_cache():
        calibrate_layers(model, windows, on_layer)
    return result
