"""Answers to the same prompts at several times of a training run, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mlxlm.cli import render
from mlxlm.utils.formatting import human_seconds, printable

if TYPE_CHECKING:
    from mlxlm.generation import LoadedModel
    from mlxlm.train import Step

TEMPERATURE = 0.4  # a small model is seldom sure of anything but the right word
_FRACTIONS = (1 / 12, 1 / 3)  # of the time limit: 10 and 40 seconds of two minutes
_MAX_TOKENS = {True: 160, False: 40}  # of an answer, and of a continued text


class Answers:
    """Answers the prompts when some time of a run has passed.

    Args:
        prompts: Questions for a model with a chat template; for others beginnings of a text.
        seconds: Time limit of the run.
    """

    def __init__(self, prompts: Sequence[str], seconds: float):
        self._prompts, self._start = prompts, time.monotonic()
        self._due = [fraction * seconds for fraction in _FRACTIONS]
        self._columns: list[tuple[str, list[str]]] = []

    def after_step(self, step: Step, lm: LoadedModel) -> None:
        """Answer the prompts if it is time: a callback of `train`."""
        if self._due and step.step < step.steps and time.monotonic() - self._start >= self._due[0]:
            seconds = time.monotonic() - self._start
            self._due = [due for due in self._due if due > seconds]
            self._columns.append((f"after {human_seconds(seconds)}", self._answer(lm)))

    def finish(self, lm: LoadedModel) -> None:
        """Answer the prompts with the finished model."""
        self._columns.append(("at the end", self._answer(lm)))

    def print(self) -> None:
        """Print a row for each prompt on stdout, with a column for each time."""
        table = Table(show_lines=True)
        table.add_column("prompt", ratio=1)
        for title, _ in self._columns:
            table.add_column(title, ratio=2)
        for i, prompt in enumerate(self._prompts):
            table.add_row(Text(prompt), *(Text(printable(answers[i]).strip()) for _, answers in self._columns))
        render.stdout_console(width=None if sys.stdout.isatty() else 120).print(table)

    def _answer(self, lm: LoadedModel) -> list[str]:
        from mlxlm.chat.generate import batch

        prompts, is_chat = self._prompts, lm.tokenizer.chat_template is not None
        answer = partial(batch, lm, max_tokens=_MAX_TOKENS[is_chat], temperature=TEMPERATURE, seed=0)
        if is_chat:
            results = answer(messages=[[{"role": "user", "content": prompt}] for prompt in prompts])
            return [result.text for result in results]
        return [prompt + result.text for prompt, result in zip(prompts, answer(prompts), strict=True)]
