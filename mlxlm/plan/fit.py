"""Which models of the catalog fit in this machine's memory."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.cache.factory import CPU_PREFILL_STEP_SIZE
from mlxlm.checkpoint.catalog import CatalogEntry, catalog
from mlxlm.config import ModelConfig
from mlxlm.families import config_from_hf
from mlxlm.plan.advice import usable_memory
from mlxlm.plan.inference import default_serving, inference_memory, with_loaded_bits
from mlxlm.plan.machines import Machine, this_machine

# Measured on a CPU with Linux: Python, MLX and a tokenizer; and the float32 arrays [heads, chunk, context] that exist
# at once while a prompt is read, 4.5 to 7.
_PROCESS_BYTES = 125 << 20
_SCORE_ARRAYS = 7
_COMFORTABLE = 0.5  # share of the memory, so that other programs can go on


@dataclass(frozen=True)
class Fit:
    """The peak memory of a chat of up to 4,096 tokens.

    It is that of the weights as they are loaded, the key-value cache and its copy in the prefix cache, on a CPU
    attention's scores, and the process.

    Attributes:
        memory: Bytes.
        fits: Whether the machine has them.
        is_comfortable: Whether they are at most half of its memory.
    """

    memory: int
    fits: bool
    is_comfortable: bool


def chat_fit(config: ModelConfig, machine: Machine) -> Fit:
    """Estimate the memory of a chat with a model on a machine."""
    serving = with_loaded_bits(default_serving(machine, config), config, machine.memory)
    needed = inference_memory(config, serving)
    memory = needed.weights + 2 * needed.cache + _PROCESS_BYTES
    if serving.device == "cpu":
        memory += _SCORE_ARRAYS * 4 * config.num_attention_heads * CPU_PREFILL_STEP_SIZE * serving.context_length
    comfortable = machine.memory is None or memory <= _COMFORTABLE * machine.memory
    return Fit(memory, memory <= usable_memory(machine.memory), comfortable)


def entry_fit(entry: CatalogEntry, machine: Machine) -> Fit:
    """Estimate the memory of a chat with a model of the catalog."""
    return chat_fit(config_from_hf(entry.config, source=f"the catalog's {entry.name}"), machine)


def best_entry() -> CatalogEntry | None:
    """The model of the catalog with the most parameters of those that take at most half of this machine's memory."""
    machine = this_machine(measure=False)
    fitting = (entry for entry in catalog().values() if entry_fit(entry, machine).is_comfortable)
    return max(fitting, key=lambda entry: entry.parameters, default=None)
