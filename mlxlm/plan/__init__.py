"""What a model costs before it is trained or used: parameters, operations, memory, time, disk.

    import mlxlm

    plan = mlxlm.plan("15m", batch_size=16, sequence_length=512)
    print(plan.parameter_count, plan.memory.total, plan.duration.seconds)

The module can be called: `mlxlm.plan(...)` is `mlxlm.plan.plan(...)`.
"""

import sys
from types import ModuleType

from mlxlm.plan.advice import Change, Fits, bits_that_fit, fits, suggest_change
from mlxlm.plan.duration import Duration
from mlxlm.plan.flops import Flops, FlopsByLength, count_training_flops, flops_by_length
from mlxlm.plan.inference import InferenceMemory, Serving, inference_memory
from mlxlm.plan.machines import MACHINES, Machine
from mlxlm.plan.memory import TrainingMemory, training_memory
from mlxlm.plan.model_lookup import find_config, reference_names
from mlxlm.plan.planner import Plan, plan
from mlxlm.plan.training import Training

__all__ = [
    "MACHINES",
    "Change",
    "Duration",
    "Fits",
    "Flops",
    "InferenceMemory",
    "Machine",
    "Plan",
    "Serving",
    "Training",
    "TrainingMemory",
    "FlopsByLength",
    "bits_that_fit",
    "suggest_change",
    "find_config",
    "fits",
    "count_training_flops",
    "inference_memory",
    "plan",
    "reference_names",
    "training_memory",
    "flops_by_length",
]


class _Callable(ModuleType):
    """`mlxlm.plan` is this package for whoever imports it, and the function for whoever calls it."""

    def __call__(self, *arguments, **options) -> Plan:
        return plan(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
