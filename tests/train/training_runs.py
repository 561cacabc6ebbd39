"""What tests of training share: quick settings, training a run to its end, the content of its checkpoints."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlxlm.report.log_entries import read_log_entries
from mlxlm.tokenizer import load
from mlxlm.train import Run, train

QUICK = {"steps": 20, "batch_size": 4, "max_seq_length": 32, "learning_rate": 3e-3, "save_every": 10, "eval_every": 10}

TIME_LIMIT = {"time_limit": 30.0, "eval_every": 0, "save_every": 5}

GPT2 = {  # whose files have other names, transposed matrices, and query, key and value in one
    "norm": "layer", "positions": "learned", "mlp_gated": False, "hidden_act": "gelu_new", "attention_bias": True,
    "mlp_bias": True, "num_key_value_heads": 4, "intermediate_size": 128,
}  # fmt: skip


def ticking_clock(seconds: float = 0.2) -> Callable[[], float]:
    """A clock that advances by `seconds` at each call, the same in every run."""
    return partial(next, itertools.count(0.0, seconds))


def finish(run: Run, resume: bool = False, stop_at: int | None = None, **options) -> list:
    """All events of training `run` to its end, or until a stop is requested at step `stop_at`."""
    events = []

    def should_stop() -> bool:
        return stop_at is not None and max((e.step for e in events), default=0) >= stop_at

    for event in train(run, load(run.path), resume=resume, should_stop=should_stop, **options):
        events.append(event)
    return events


def read_log(run: Run) -> list[dict]:
    return list(read_log_entries(run.log_file))


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {name: (checkpoint / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
