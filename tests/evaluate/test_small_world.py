"""Scores on the built-in corpus."""

import json
import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cli.main import _run
from mlxlm.data.small_world import corpus
from mlxlm.data.small_world.corpus import EVALUATED_KINDS, held_out_conversations, held_out_questions
from mlxlm.evaluate import small_world
from mlxlm.evaluate.small_world import KindScore, evaluate_small_world, held_out_bits_per_byte
from mlxlm.model import Decoder

GOLD = {turn.question: turn.answer for kind in EVALUATED_KINDS for turn in islice(held_out_questions(kind), 4)}


@pytest.fixture
def answers(monkeypatch):
    """Answers by question, instead of a model's; others are empty."""
    known = {}

    def batch(_lm, messages, **_options):
        return [SimpleNamespace(text=known.get(conversation[0]["content"], "")) for conversation in messages]

    monkeypatch.setattr(small_world, "batch", batch)
    return known


def test_right_answers_are_counted(answers):
    seen = []
    assert evaluate_small_world(None, 4) == [KindScore(kind, 0, 4) for kind in EVALUATED_KINDS]
    answers |= GOLD
    scores = evaluate_small_world(None, 4, progress=lambda done, total: seen.append((done, total)))
    assert scores == [KindScore(kind, 4, 4) for kind in EVALUATED_KINDS]
    assert seen == [(4 * (i + 1), 4 * len(EVALUATED_KINDS)) for i in range(len(EVALUATED_KINDS))]
    del answers[next(held_out_questions("sums")).question]
    assert {score.kind: score.correct for score in evaluate_small_world(None, 4)}["sums"] == 3


def test_the_command(answers, monkeypatch, capsys):
    monkeypatch.setattr("mlxlm.generation.load", lambda model, adapter=None: None)
    answers |= GOLD
    assert _run(["evaluate", "MODEL", "--small-world", "--num-questions", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["scores"][0] == {"kind": "stories", "correct": 4, "questions": 4}
    assert _run(["evaluate", "MODEL", "--small-world", "--num-questions", "4"]) == 0
    assert "4 of 4" in capsys.readouterr().out
    assert _run(["evaluate", "MODEL", "--small-world", "text.txt"]) == 2
    assert _run(["evaluate", "MODEL", "text.txt", "--num-questions", "4"]) == 2


def test_bits_per_byte_are_those_of_the_answers_after_their_own_conversation(tiny_config, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(corpus, "_HELD_OUT_QUESTIONS", 2)
    model = Decoder(tiny_config)
    model.init_weights(0)
    model.update({"model": {"embed_tokens": {"weight": 20 * model.model.embed_tokens.weight}}})  # far from uniform
    bits = size = 0.0
    for turns in held_out_conversations():
        ids = [tiny_tokenizer.bos_token_id]
        for turn in turns:
            parts = f"<|user|>{turn.question}<|end|><|assistant|>", f"{turn.answer}<|end|>"
            question, answer = (tiny_tokenizer.encode(p, add_special_tokens=False, parse_special=True) for p in parts)
            ids += question
            logits = np.array(model(mx.array([ids + answer])))[0].astype(np.float64)
            log_sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
            positions = np.arange(len(ids) - 1, len(ids) + len(answer) - 1)
            bits += (log_sums[positions] - logits[positions, answer]).sum() / math.log(2)
            size += len(turn.answer.encode())
            ids += answer
    lm = SimpleNamespace(model=model, tokenizer=tiny_tokenizer, config=tiny_config)
    assert held_out_bits_per_byte(lm) == pytest.approx(bits / size, rel=1e-4)
