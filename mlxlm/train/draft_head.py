"""Training of a draft head on what a model generates; see `mlxlm.generation.draft_head`.

The model continues pieces of a text, and its hidden states are kept. The head learns to predict these, and the
distributions that the model draws from, for several tokens ahead. The model doesn't change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx, nn, optim, tree_flatten
from mlxlm.cache import fingerprint, make_cache
from mlxlm.config import ModelConfig
from mlxlm.data.sources import read_texts
from mlxlm.generation import LoadedModel
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.draft_head import DraftHead
from mlxlm.model import Decoder, MTPModule
from mlxlm.model.decoder import soft_capped
from mlxlm.model.multi_token_prediction import output_rows
from mlxlm.train.draft_settings import DraftSettings
from mlxlm.utils.errors import DataError, GenerationError

Progress = Callable[[str, int, int], None]  # a phase, what is done of it, and all of it

ROW_TOKENS = 256  # at most; half of them from the text, the others generated
MAX_CHARS = 8 << 20  # that are read of all texts together
_ROWS_AT_ONCE = 32  # that are generated
_BATCH_SIZE = 8
_DEPTH = 2  # tokens ahead
_HIDDEN_WEIGHT = 10.0  # after 3 epochs on 30,000 tokens, the cross-entropy of SmolLM2-135M's is 4.46; with 0, 4.74
_HELD_OUT = 16  # One in 16 rows is held out, to measure the loss and the accuracy.
_TEMPERATURES = (0.0, 0.8)  # of the rows in turn


@dataclass(frozen=True)
class DraftReport:
    """What the training of a head has reached.

    Attributes:
        parameters: Parameters of the head.
        tokens: Tokens of an epoch.
        coverage: The share of the generated tokens that the head can draft.
        losses: Before the training and after each epoch, on rows that it wasn't trained on.
        accuracy: On these, how often its most likely token is the model's, 1 and 2 tokens ahead.
    """

    parameters: int
    tokens: int
    coverage: float
    losses: list[float]
    accuracy: list[float]


def train_draft_head(
    lm: LoadedModel,
    texts: Sequence[Path | str],
    settings: DraftSettings | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> tuple[DraftHead, DraftReport]:
    """Train a draft head for a model.

    Args:
        lm: The model.
        texts: Files that resemble what the model will write, of any kind that `mlxlm pretrain` reads.
        settings: How much to generate, and how to train.
        progress: Called often.

    Raises:
        DataError: The texts can't be read, or are too short.
        GenerationError: The model is one that mlx_lm runs, or is split over several processes.
    """
    settings, model = settings or DraftSettings(), lm.model
    lm.check_whole("draft head")
    if not isinstance(model, Decoder):
        raise GenerationError(f"mlx_lm runs {lm.path}, and gives no hidden states", "a draft model")
    tokens, hidden_states = generate_rows(lm, texts, settings.num_tokens, settings.seed, progress)
    ids, counts = np.unique(tokens, return_counts=True)
    most_frequent = np.argsort(-counts, kind="stable")[: settings.vocab_size]
    token_ids = np.sort(ids[most_frequent]).astype(np.int32)
    trainer = _Trainer(model, mx.array(token_ids), tokens, hidden_states, settings)
    trainer.train(progress)
    head = DraftHead(trainer.module, trainer.token_ids, fingerprint(model))
    parameters = sum(x.size for _, x in tree_flatten(trainer.module.parameters()))
    coverage = counts[most_frequent].sum() / counts.sum()
    return head, DraftReport(parameters, tokens.size, float(coverage), trainer.losses, trainer.accuracy)


def generate_rows(
    lm: LoadedModel, texts: Sequence[Path | str], num_tokens: int, seed: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Let a model continue pieces of texts, every other one greedily.

    Returns:
        Tokens int32 `[R, T]`, of which the first half are the text's, and the hidden states after each token, float16
        `[R, T, hidden]`.
    """
    length = min(ROW_TOKENS, lm.config.max_position_embeddings)
    ids, rng, count = _encode(lm, texts), np.random.default_rng(seed), num_tokens // length
    if len(ids) < length:
        raise DataError(f"the texts have {len(ids)} tokens", f"{length} tokens or more; better 100,000")
    starts = rng.integers(0, len(ids) - length // 2, count)
    prompts = np.stack([ids[start : start + length // 2] for start in starts])
    step, parts = DecodeStep(lm.model), []
    for i in range(0, count, _ROWS_AT_ONCE):

        def advance(num_tokens: int, rows_before: int = i) -> None:
            progress("generating", rows_before * length + num_tokens, count * length)

        parts.append(_continue(lm, step, prompts[i : i + _ROWS_AT_ONCE], length, mx.random.key(seed + i), advance))
    tokens, hidden_states = zip(*parts, strict=True)
    return np.concatenate(tokens), np.concatenate(hidden_states)


def _continue(
    lm: LoadedModel,
    step: DecodeStep,
    prompts: np.ndarray,
    length: int,
    key: mx.array,
    advance: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts `[R, P]` to rows of `length` tokens; returns these and the hidden states."""
    caches, tokens = make_cache(lm.model), [mx.array(prompts)]
    logits, states = lm.model.decode(tokens[0], caches)
    logits, hidden_states = logits[:, -1], [states]
    temperatures = mx.array([_TEMPERATURES[i % len(_TEMPERATURES)] for i in range(len(prompts))])[:, None]
    ends = mx.array(sorted(lm.eos_token_ids), mx.int32)
    for position, own_key in enumerate(mx.random.split(key, length - prompts.shape[1]), prompts.shape[1]):
        advance(len(prompts) * position)
        if ends.size:
            logits[:, ends] = -mx.inf  # no text ends before its row
        noise = temperatures * mx.random.gumbel(logits.shape, key=own_key)
        tokens.append(mx.argmax(logits + noise, axis=1, keepdims=True).astype(mx.int32))
        logits = step(tokens[-1], caches)
        assert step.hidden_states is not None  # a Decoder has them
        hidden_states.append(step.hidden_states[:, None])
        eval_arrays(logits, hidden_states[-1])
    whole = mx.concatenate(hidden_states, axis=1).astype(mx.float16)
    return np.array(mx.concatenate(tokens, axis=1)), np.array(whole)


def _encode(lm: LoadedModel, texts: Sequence[Path | str]) -> np.ndarray:
    """The tokens of the beginnings of some texts, as many characters of each."""
    ids, limit = list[int](), MAX_CHARS // len(texts)
    for path in texts:
        text = ""
        for piece in read_texts([path]):
            text += piece
            if len(text) >= limit:
                break
        ids += lm.tokenizer.encode(text[:limit], add_special_tokens=False)
    return np.array(ids, np.int32)


class _Trainer:
    """Trains a module on rows of tokens and hidden states.

    Attributes:
        module: The module.
        token_ids: The tokens that it drafts.
        losses: On rows that are held out, before the training and after each epoch.
        accuracy: On these, how often its most likely token is the model's, 1, 2, ... tokens ahead.
    """

    def __init__(
        self,
        model: Decoder,
        token_ids: mx.array,
        tokens: np.ndarray,
        hidden_states: np.ndarray,
        settings: DraftSettings,
    ):
        self.token_ids, self._tokens, self._hidden_states = token_ids, tokens, hidden_states
        self._settings, self.losses, self.accuracy = settings, list[float](), list[float]()
        self._embed, self._softcap = model.model.embed_tokens, model.final_logit_softcap
        rows = output_rows(model, token_ids)
        self._weight, self._bias = rows.weight, rows.get("bias")
        if "scales" in rows:
            form = {"group_size": rows.group_size, "bits": rows.bits, "mode": rows.mode}
            self._weight = mx.dequantize(rows.weight, rows.scales, rows.get("biases"), **form)
        self._weight = self._weight.astype(mx.float32)
        held_out = np.arange(len(tokens)) % _HELD_OUT == 0
        self._held_out, self._trained = np.flatnonzero(held_out), np.flatnonzero(~held_out)
        sample = hidden_states[:_BATCH_SIZE].astype(np.float32)
        self._size = float(np.sqrt(np.square(sample).mean()))  # of a hidden state's numbers
        self.module = MTPModule(layer_config(model.config))
        self._init_weights()
        mx.eval(self.module.parameters(), self._weight, self._bias)

    def _init_weights(self) -> None:
        """Initialize the weights so that the first predictions are about the hidden states that are read."""
        module, size = self.module, self._weight.shape[1]
        keys = iter(mx.random.split(mx.random.key(self._settings.seed), 16))
        weights = []
        for name, x in tree_flatten(module.parameters()):
            if x.ndim == 2:
                scale = 0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                weights.append((name, scale * mx.random.normal(x.shape, key=next(keys))))
        module.load_weights(weights, strict=False)
        module.fc.weight[:, :size] += mx.eye(size)
        module.norm.weight = mx.full(size, self._size)

    def train(self, progress: Progress) -> None:
        """Train the module; appends to `losses`."""
        module, settings = self.module, self._settings
        rate, num_steps = settings.learning_rate, settings.epochs * len(_batches(self._trained))
        warmup = num_steps // 20 + 1
        schedules = [optim.linear_schedule(0, rate, warmup), optim.cosine_decay(rate, num_steps, 0.05 * rate)]
        optimizer = optim.AdamW(optim.join_schedules(schedules, [warmup]), betas=[0.9, 0.95])
        gradient_of, rng, done = nn.value_and_grad(module, self._loss), np.random.default_rng(settings.seed), 0
        self._evaluate()
        for _ in range(settings.epochs):
            module.train()
            for rows in _batches(rng.permutation(self._trained)):
                _, gradients = gradient_of(module, *self._inputs(rows))
                gradients, _ = optim.clip_grad_norm(gradients, 1.0)
                optimizer.update(module, gradients)
                eval_arrays(module.parameters(), optimizer.state)
                done += 1
                progress("training", done, num_steps)
            self._evaluate()

    def _evaluate(self) -> None:
        """Measure loss and accuracy on the rows that are held out."""
        self.module.eval()
        loss, hits, count = 0.0, np.zeros(_DEPTH), len(self._held_out)
        for rows in _batches(self._held_out):
            inputs = self._inputs(rows)
            loss += self._loss(self.module, *inputs).item() * len(rows) / count
            for i, (_, _, logits, probabilities) in enumerate(self._predictions(self.module, *inputs)):
                is_same = mx.argmax(logits, axis=-1) == mx.argmax(probabilities, axis=-1)
                hits[i] += is_same.mean().item() * len(rows) / count
        self.losses.append(loss)
        self.accuracy = hits.tolist()

    def _inputs(self, rows: np.ndarray) -> tuple[mx.array, mx.array, mx.array]:
        """Of some rows the embeddings, hidden states and probabilities of the next token, float32 `[B, T, ...]`."""
        hidden_states = mx.array(self._hidden_states[rows].astype(np.float32))
        embeddings = self._embed(mx.array(self._tokens[rows])).astype(mx.float32)
        return embeddings, hidden_states, mx.softmax(self._logits(hidden_states), axis=-1)

    def _loss(self, module: MTPModule, *inputs: mx.array) -> mx.array:
        """The loss: of the distributions the cross-entropy, and of the hidden states the smooth L1 distance."""
        losses = []
        for predicted, expected, logits, probabilities in self._predictions(module, *inputs):
            cross_entropy = mx.logsumexp(logits, axis=-1) - (probabilities * logits).sum(axis=-1)
            distance = nn.losses.smooth_l1_loss(predicted / self._size, expected / self._size)
            losses.append(cross_entropy.mean() + _HIDDEN_WEIGHT * distance)
        return mx.stack(losses).mean()

    def _predictions(
        self, module: MTPModule, embeddings: mx.array, hidden_states: mx.array, probabilities: mx.array
    ) -> Iterator[tuple[mx.array, mx.array, mx.array, mx.array]]:
        """Yield predicted and true hidden states, logits and probabilities of what is 1, 2, ... tokens ahead."""
        predicted, length = hidden_states, hidden_states.shape[1]
        for ahead in range(1, _DEPTH + 1):
            predicted = module(predicted[:, : length - ahead], embeddings[:, ahead:])
            yield predicted, hidden_states[:, ahead:], self._logits(predicted), probabilities[:, ahead:]

    def _logits(self, hidden_states: mx.array) -> mx.array:
        logits = hidden_states @ self._weight.T
        return soft_capped(logits if self._bias is None else logits + self._bias, self._softcap)


def _batches(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + _BATCH_SIZE] for i in range(0, len(rows), _BATCH_SIZE)]


def layer_config(config: ModelConfig) -> ModelConfig:
    """The configuration of a Llama's layer for hidden states of a model, with its heads if they are usual ones."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if config.kv_lora_rank is not None:  # latent attention has up to seven times as wide ones
        head_dim = 64
        heads = kv_heads = max(1, config.hidden_size // head_dim)
    return ModelConfig(
        hidden_size=config.hidden_size, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, intermediate_size=config.intermediate_size, vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings, rms_norm_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip
