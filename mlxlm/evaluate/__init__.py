"""How well a model predicts: prepared data, as training does; any text, in a strided window; questions with choices."""

from mlxlm.evaluate.dataset import Evaluation, evaluate_dataset

__all__ = ["Evaluation", "evaluate_dataset"]
