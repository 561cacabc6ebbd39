"""Evaluate a model on the built-in corpus: questions whose combination of words it was not trained on.

Either the model answers and its answers are checked, or the bits per byte of the right answers are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxlm.chat.generate import batch
from mlxlm.config import ModelConfig
from mlxlm.config.components import POSITIONS
from mlxlm.data import DataOptions, TokenDataset, prepare
from mlxlm.data.small_world.corpus import (
    EVALUATED_KINDS,
    held_out_conversations,
    held_out_questions,
    is_right,
    messages,
)
from mlxlm.evaluate.loss import evaluate_dataset
from mlxlm.generation import LoadedModel
from mlxlm.utils.json_files import json_line

_MAX_TOKENS = 200  # longer than any answer of the corpus
_ROW = 640  # tokens: longer than any held-out conversation, even if each byte is a token


@dataclass(frozen=True)
class KindScore:
    """The answers to one kind of question.

    Attributes:
        kind: Such as "sums".
        correct: How many answers are right.
        questions: How many were asked.
    """

    kind: str
    correct: int
    questions: int


def evaluate_small_world(
    lm: LoadedModel,
    num_questions: int = 20,
    *,
    seed: int = 0,
    temperature: float = 0.0,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[KindScore]:
    """Ask a model held-out questions of each kind of the small-world corpus.

    Args:
        lm: A model with a chat template.
        num_questions: Of each kind; some have fewer.
        seed: Chooses the questions, and the answers if the temperature is above 0.
        temperature: Sampling temperature; 0 is greedy.
        progress: Called with the number of answered questions and of all questions.

    Raises:
        GenerationError: The model has no chat template.
    """
    scores = []
    for i, kind in enumerate(EVALUATED_KINDS):
        turns = list(islice(held_out_questions(kind, seed), num_questions))
        conversations = [[{"role": "user", "content": turn.question}] for turn in turns]
        answers = batch(lm, messages=conversations, max_tokens=_MAX_TOKENS, temperature=temperature, seed=seed)
        correct = sum(is_right(turn, answer.text) for turn, answer in zip(turns, answers, strict=True))
        scores.append(KindScore(kind, correct, len(turns)))
        progress((i + 1) * num_questions, len(EVALUATED_KINDS) * num_questions)
    return scores


def held_out_bits_per_byte(lm: LoadedModel) -> float:
    """Return the bits per byte of the answers in `held_out_conversations` of small-world.

    Every answer is predicted after its own conversation only, so the result doesn't depend on how the model was trained
    to use rows of several conversations, and it can be compared between tokenizers. The end of an answer is predicted,
    too, and has no bytes.

    Raises:
        DataError: The tokenizer has no tokens for the roles of a conversation.
    """
    conversations = list(held_out_conversations())
    answer_bytes = sum(len(turn.answer.encode()) for turns in conversations for turn in turns)
    with TemporaryDirectory() as folder:
        file = Path(folder, "held-out.jsonl")
        file.write_bytes(b"".join(json_line({"messages": messages(turns)}) for turns in conversations))
        prepare(DataOptions([file], validation_fraction=0), lm.tokenizer, Path(folder, "data"))
        data = TokenDataset.open(Path(folder, "data"), "train")
        # Positions from a table end with the context: there, longer conversations are cropped.
        ends = isinstance(lm.config, ModelConfig) and POSITIONS[lm.config.positions].table
        row = min(_ROW, lm.config.max_position_embeddings) if ends else _ROW
        loss = evaluate_dataset(lm.model, data, row, document_mask=True, mask_prompt=True).loss
        return loss / math.log(2) * data.num_targets() / answer_bytes
