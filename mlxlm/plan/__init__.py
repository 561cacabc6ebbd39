"""Plan a model before it is trained or used: parameters, operations, memory, time and disk space.

    import mlxlm

    plan = mlxlm.plan("15m", batch_size=16, max_seq_length=512)
    print(plan.parameter_count, plan.memory.total, plan.duration.seconds)

The package can be called: `mlxlm.plan(...)` is `mlxlm.plan.plan(...)`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlxlm.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mlxlm.plan.advice import Fits, best_entry, bits_that_fit, chat_fit, entry_fit, find_limits, suggest_change
    from mlxlm.plan.flops import count_training_flops
    from mlxlm.plan.inference import Serving, inference_memory, quantized_bits
    from mlxlm.plan.machines import MACHINES, Machine, custom_machine, this_machine
    from mlxlm.plan.memory import training_memory
    from mlxlm.plan.model_lookup import find_config
    from mlxlm.plan.planner import Duration, Plan, plan
    from mlxlm.plan.training import Training

__all__ = [
    "MACHINES",
    "Duration",
    "Fits",
    "Machine",
    "Plan",
    "Serving",
    "Training",
    "best_entry",
    "bits_that_fit",
    "chat_fit",
    "custom_machine",
    "entry_fit",
    "suggest_change",
    "find_config",
    "find_limits",
    "count_training_flops",
    "inference_memory",
    "plan",
    "quantized_bits",
    "this_machine",
    "training_memory",
]
__getattr__ = lazy_exports(__name__)


class _Callable(ModuleType):
    """A package that can be called, since `mlxlm.plan` is both this package and the function."""

    def __call__(self, *args: Any, **options: Any) -> "Plan":
        return self.plan(*args, **options)


sys.modules[__name__].__class__ = _Callable
