"""GRPO: reinforcement learning with a reward function, without a value model (Shao et al. 2024, "DeepSeekMath", 4.1).

Each step generates a group of answers to each of some prompts. An answer's advantage is its reward relative to those of
its group, and the policy gradient is that of its tokens' log-probabilities times the advantage. There is one update per
group, so the ratio of new to old probabilities is 1 and nothing is clipped; and there is no KL penalty.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.chat.chat_encoder import message_encoder
from mlxlm.data.prompts import PromptRecord, load_prompts, prompt_order
from mlxlm.generation import Engine, GenerationOptions, GenerationResult, LoadedModel, Request, run_batch
from mlxlm.generation.jsonl import EncodedPrompt, PromptEncoder
from mlxlm.kernels import linear_cross_entropy
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.run import Run
from mlxlm.train.settings import GRPOOptions, TrainSettings
from mlxlm.train.step import LossSums
from mlxlm.utils.errors import DataError, MlxlmError, TrainingError, short_repr

RewardFunction = Callable[..., float]  # (prompt, completion, **fields), see `Rewards`
_EPSILON = 1e-4  # added to the standard deviation, as in TRL
_MIN_COLUMNS = 32  # of a batch: fewer save little time, and each other length is compiled


class RewardError(TrainingError):
    """The reward function has failed, or has returned something other than a finite number."""


@dataclass(frozen=True)
class Rewards:
    """Calls a reward function.

    Args:
        function: Called with the prompt (a text, or a list of messages), the completion (the text that the model has
            generated), and those of the prompt's other fields that it has parameters for, or all if it has **kwargs.
            Returns a number: more is better.
    """

    function: RewardFunction

    def _arguments(self, prompt: PromptRecord) -> dict[str, Any]:
        parameters = list(inspect.signature(self.function).parameters.values())
        fields = {name: x for name, x in prompt.fields.items() if name not in [p.name for p in parameters[:2]]}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return fields
        return {p.name: fields[p.name] for p in parameters if p.name in fields}

    def check(self, prompts: Sequence[PromptRecord]) -> None:
        """Raise DataError for a prompt that lacks a field for a parameter of the function."""
        signature = inspect.signature(self.function)
        for prompt in prompts:
            try:
                signature.bind(prompt.prompt, "", **self._arguments(prompt))
            except TypeError as error:
                hint = "a function such as def reward(prompt, completion, answer), and a field for each other parameter"
                raise DataError(f"{prompt.location} doesn't fit the reward function: {error}", hint) from None

    def __call__(self, prompt: PromptRecord, completion: str) -> float:
        """Return the reward of a completion. Raises RewardError, which names the prompt."""
        try:
            reward = self.function(prompt.prompt, completion, **self._arguments(prompt))
        except Exception as error:
            problem = f"the reward function failed for {prompt.location}: {type(error).__name__}: {error}"
            raise RewardError(problem, "--debug, which prints where") from error
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise RewardError(f"the reward for {prompt.location} is {short_repr(reward)}", "a finite number")
        return value


def group_advantages(rewards: np.ndarray, *, scale: bool) -> np.ndarray:
    """Return the advantage of each answer within its group.

    Args:
        rewards: float64 `[P, G]`, of G answers to each of P prompts.
        scale: Whether to divide by the standard deviation of the group (eq. 3 of Shao et al. 2024). Dr. GRPO doesn't,
            because it gives prompts that are nearly always or nearly never answered well a larger weight.

    Returns:
        float64 `[P, G]`.
    """
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return centered / (rewards.std(axis=1, ddof=1, keepdims=True) + _EPSILON) if scale else centered


def token_weights(advantages: np.ndarray, lengths: np.ndarray, options: GRPOOptions) -> np.ndarray:
    """Return what the cross-entropy of each token of an answer is multiplied by; the loss is the mean over answers.

    Args:
        advantages: float64 `[N]`.
        lengths: int `[N]`, the tokens of each answer.
        options: Whose `loss_type` says how an answer's length counts: "dapo" gives each token of a step the same weight
            (Yu et al. 2025, "DAPO", eq. 12), "grpo" each answer (Shao et al. 2024, eq. 3), which favors long wrong
            answers; "dr_grpo" divides by `max_tokens` (Liu et al. 2025, "Understanding R1-Zero-Like Training", 3.2).

    Returns:
        float64 `[N]`.
    """
    divisors = {"dapo": lengths.mean(), "grpo": lengths, "dr_grpo": options.max_tokens}
    return advantages / divisors[options.loss_type]


class GRPOBatch(NamedTuple):
    """Answers of one forward pass.

    Attributes:
        tokens: int32 `[B, T + 1]`, prompts and answers, padded at the end.
        loss_weights: float32 `[B, T]`, see `token_weights`; 0 for prompts and padding.
        reward: float32 `[B]`.
        no_signal: float32 `[B]`, 1 if all rewards of the group are equal, so that nothing is learned from it.
        length: float32 `[B]`, the tokens of each answer.
        truncated: float32 `[B]`, 1 for an answer that didn't end within `max_tokens`.
    """

    tokens: np.ndarray
    loss_weights: np.ndarray
    reward: np.ndarray
    no_signal: np.ndarray
    length: np.ndarray
    truncated: np.ndarray


def grpo_loss(
    model: Decoder, tokens: mx.array, loss_weights: mx.array, *, temperature: float = 1.0, **statistics: mx.array
) -> LossSums:
    """Compute the policy-gradient loss of a `GRPOBatch`, whose gradient is that of GRPO. See `Loss`.

    Its value is not a measure of progress: the rewards are.

    Args:
        model: The model.
        tokens: Int `[B, T + 1]`.
        loss_weights: float32 `[B, T]`.
        temperature: That of the samples: the policy is softmax(logits / temperature).
        statistics: The other arrays of the batch, float32 `[B]`, whose means are the metrics.
    """
    hidden = model.model(tokens[:, :-1]) / temperature
    bias, softcap = model.head_bias, model.final_logit_softcap
    total = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), model.head_weight, tokens[:, 1:].flatten(), loss_weights.flatten(),
        bias=None if bias is None else bias / temperature, softcap=None if softcap is None else softcap / temperature,
        training=True,
    )  # fmt: skip
    count = mx.array(float(len(tokens)))
    return total, count, {name: mx.stack([values.sum(), count]) for name, values in statistics.items()}


class GRPOBatches:
    """The batches of each step: answers of the model as it is then, with their rewards.

    The seed of an answer depends on the step and the answer's number, so that a resumed run samples the same.

    Attributes:
        dropped_fraction: Always 0, as `TrainBatches` has it.
        padding: Always 0, too.
    """

    dropped_fraction = padding = 0.0

    def __init__(self, run: Run, model: Decoder, tokenizer: Tokenizer, reward: RewardFunction):
        assert run.settings.grpo is not None
        self._settings, self._options = run.settings, run.settings.grpo
        self._lm = LoadedModel(model, tokenizer, run.config, run.path)
        self._prompts, self._held_out = (load_prompts(run.data, split) for split in ("train", "validation"))
        self._encode, self._reward = prompt_encoder(self._lm), Rewards(reward)

    @property
    def _prompts_per_step(self) -> int:
        return self._settings.rows_per_step // self._options.num_generations

    def epoch_at(self, step: int) -> float:
        """Return the passes over the prompts after step `step`."""
        return step * self._prompts_per_step / len(self._prompts)

    def epochs(self, step: int) -> dict[str, float]:
        """Return the same by source; there is one."""
        return {"train": self.epoch_at(step)}

    def read_step(self, step: int) -> list[GRPOBatch]:
        """Generate the batches of step number `step`, from 1."""
        count, size = self._prompts_per_step, self._options.num_generations
        order = prompt_order(len(self._prompts), (step - 1) * count, count, self._settings.seed)
        prompts = [self._prompts[i] for i in order]
        options = GenerationOptions(
            temperature=self._options.temperature, max_tokens=self._options.max_tokens, seed=self._settings.seed
        )
        encoded = [self._encode(prompt) for prompt in prompts]
        requests = [one.request(options).sample(f"{step}.{i}", k) for i, one in enumerate(encoded) for k in range(size)]
        results, rewards = self._generate(requests, [prompt for prompt in prompts for _ in range(size)])
        rows = [([*request.prompt], result.tokens) for request, result in zip(requests, results, strict=True)]
        truncated = np.array([result.finish_reason in ("length", "context") for result in results])
        return make_batches(rows, rewards.reshape(count, size), truncated, self._settings)

    def mean_reward(self) -> float:
        """Return the mean reward of greedy answers to the prompts that are held out."""
        options = GenerationOptions(temperature=0.0, max_tokens=self._options.max_tokens)
        requests = [self._encode(prompt).request(options) for prompt in self._held_out]
        return float(self._generate(requests, self._held_out)[1].mean())

    def _generate(
        self, requests: Sequence[Request], prompts: Sequence[PromptRecord]
    ) -> tuple[list[GenerationResult], np.ndarray]:
        """Return an answer to each request, and its reward, float64 `[N]`."""
        results: dict[int, GenerationResult] = {}
        rewards = np.zeros(len(requests))
        with self._policy(), Engine(self._lm) as engine:  # a new one: no keys and values of earlier weights
            for number, result in run_batch(engine, requests):
                if isinstance(result, MlxlmError):
                    raise result.prefixed(prompts[number].location)
                results[number] = result
                rewards[number] = self._reward(prompts[number], result.text)
        return [results[number] for number in range(len(requests))], rewards

    @contextmanager
    def _policy(self) -> Iterator[None]:
        """Let the model generate as it computes in training: with its weights themselves, in the compute dtype."""
        model, dtype = self._lm.model, getattr(mx, self._settings.dtype)
        weights = model.trainable_parameters()
        model.eval()
        model.update(tree_map(lambda weight: weight.astype(dtype), weights))
        try:
            yield
        finally:
            model.update(weights)
            model.train()


def make_batches(
    rows: Sequence[tuple[list[int], list[int]]],
    rewards: np.ndarray,
    truncated: np.ndarray,
    settings: TrainSettings,
) -> list[GRPOBatch]:
    """Make the batches of a step.

    Args:
        rows: The tokens of the prompt and of the answer, for each answer; those of a group follow each other.
        rewards: float64 `[P, G]`.
        truncated: bool `[N]`, with N = P · G.
        settings: Those of the run.
    """
    assert settings.grpo is not None
    lengths = np.array([len(answer) for _, answer in rows])
    advantages = group_advantages(rewards, scale=settings.grpo.loss_type != "dr_grpo")
    weights = token_weights(advantages.flatten(), lengths, settings.grpo)
    columns = _MIN_COLUMNS
    while columns < max(len(prompt) + len(answer) for prompt, answer in rows) - 1:
        columns *= 2
    columns = min(columns, settings.max_seq_length)
    tokens, loss_weights = np.zeros((len(rows), columns + 1), np.int32), np.zeros((len(rows), columns), np.float32)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        tokens[row, :end] = [*prompt, *answer]
        loss_weights[row, len(prompt) - 1 : end - 1] = weights[row]
    no_signal = np.repeat(np.ptp(rewards, axis=1) == 0, rewards.shape[1])
    arrays = (x.astype(np.float32) for x in (rewards.flatten(), no_signal, lengths, truncated))
    whole, size = GRPOBatch(tokens, loss_weights, *arrays), settings.batch_size
    return [GRPOBatch(*(x[i : i + size] for x in whole)) for i in range(0, len(rows), size)]


def prompt_encoder(lm: LoadedModel) -> Callable[[PromptRecord], EncodedPrompt]:
    """Return a function that encodes prompts: a text as a user's message, or as it is without a chat template.

    It raises DataError, with the location of the prompt in front.
    """
    encoder = PromptEncoder(lm, message_encoder(lm), as_chat=lm.tokenizer.chat_template is not None)

    def encode(prompt: PromptRecord) -> EncodedPrompt:
        try:
            return encoder.encode({"prompt" if isinstance(prompt.prompt, str) else "messages": prompt.prompt})
        except MlxlmError as error:
            raise error.prefixed(prompt.location, DataError) from None

    return encode
