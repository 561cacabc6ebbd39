"""Texts that a model in training makes, to be read by people."""

from __future__ import annotations

from mlxlm.generation import LoadedModel, generate
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings


def sample_text(model: Decoder, tokenizer: Tokenizer, run: Run, settings: TrainSettings) -> str:
    """How the model continues the sample prompt, always by the same seed; the model is in training mode again after."""
    lm = LoadedModel(model, tokenizer, run.config, run.path)
    model.eval()
    try:
        options = {"max_tokens": settings.sample_tokens, "temperature": 0.8, "seed": settings.seed}
        return generate(lm, _prompt(tokenizer, settings.sample_prompt), **options).text
    finally:
        model.train()


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text`, or where it has none, the one that begins texts: BOS or EOS."""
    if text:
        return tokenizer.encode(text)
    return [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
