"""`mlxlm presets`: list the model sizes that ship with mlxlm."""

from __future__ import annotations

import click

from mlxlm.cli import render
from mlxlm.cli.options import json_option
from mlxlm.families import config_to_hf, load_preset, preset_names
from mlxlm.utils.formatting import human_bytes, human_count


@click.command()
@json_option
def presets(as_json: bool) -> None:
    """List the model sizes that ship with mlxlm."""
    configs = {name: load_preset(name) for name in preset_names()}
    if as_json:
        counts = {name: {**config_to_hf(c), "parameters": c.parameter_count()} for name, c in configs.items()}
        render.emit_json(counts)
        return
    header = ("preset", "parameters", "hidden", "layers", "heads", "KV heads", "vocabulary", "context", "KV/token")
    rows = [
        (
            name,
            human_count(c.parameter_count()),
            c.hidden_size,
            c.num_hidden_layers,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.vocab_size,
            c.max_position_embeddings,
            human_bytes(c.kv_bytes_per_token()),
        )
        for name, c in configs.items()
    ]
    render.print_table(rows, header)
