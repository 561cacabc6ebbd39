"""Sample texts of a model in training."""

from __future__ import annotations

from mlxlm.generation import LoadedModel, generate
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings


def sample_text(model: Decoder, tokenizer: Tokenizer, run: Run, settings: TrainSettings) -> str:
    """Generate text after the sample prompt, always with the same seed, and leave the model in training mode."""
    lm = LoadedModel(model, tokenizer, run.config, run.path)
    model.eval()
    try:
        options = {"max_tokens": settings.sample_tokens, "temperature": 0.8, "seed": settings.seed}
        return generate(lm, _encode_prompt(tokenizer, settings.sample_prompt), **options).text
    finally:
        model.train()


def _encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of `text`; of an empty one, the token that begins texts: BOS or EOS."""
    if text:
        return tokenizer.encode(text)
    return [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None][:1]
