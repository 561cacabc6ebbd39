"""Evaluates models: the loss on prepared data, the perplexity of any text, and multiple-choice accuracy."""

from mlxlm.evaluate.loss import Evaluation, evaluate_dataset

__all__ = ["Evaluation", "evaluate_dataset"]
