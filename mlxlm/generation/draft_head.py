"""A draft head: a layer that predicts a model's next hidden states, and so drafts its next tokens.

It is the module of multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2), added to a trained model as in EAGLE
(Li et al. 2024, 2401.15077). It drafts from a part of the vocabulary, as in FR-Spec (Zhao et al. 2025, 2502.14856).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.cache import KVCache, KVOptions, fingerprint
from mlxlm.checkpoint import safetensors
from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_number
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.drafters import DraftState, sample_draft
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.sampling import Sampler
from mlxlm.model import Decoder, MTPModule
from mlxlm.utils.errors import CheckpointError, ConfigError, GenerationError, short_repr
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import read_json_object, write_json

MODEL_TYPE = "mlxlm_draft_head"  # in config.json
MAX_UNREAD = 256  # tokens that are read after a pause, or a few more; earlier ones are skipped
_CONFIG_FILE, _TOKEN_IDS = "config.json", "token_ids"
_MAX_CONFIG = 4 << 20  # bytes; that of a model is read to see that it is none
_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
    "rope_theta", "max_position_embeddings", "vocab_size",
)  # fmt: skip
_LONGEST_ROUND = 33  # tokens that a round gives at most


class DraftHead:
    """Drafts by an `MTPModule`, which reads the hidden states of the text that is generated, but not of its prompt.

    Args:
        module: The module, in float32.
        token_ids: The tokens that it drafts, int32 `[N]`.
        target: The fingerprint of the model that it was trained for.
    """

    def __init__(self, module: MTPModule, token_ids: mx.array, target: str):
        self.module, self.token_ids, self.target = module, token_ids, target
        self._bound: tuple[Decoder, BoundHead] | None = None

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError if the head was trained for another model."""
        if not isinstance(lm.model, Decoder) or fingerprint(lm.model) != self.target:
            problem = f"the draft head was trained for another model than {lm.path}"
            raise GenerationError(problem, "one that `mlxlm draft` trained for this model")

    def begin(self, model: nn.Module, kv: KVOptions, prompt: Sequence[int]) -> DraftState:
        """Start to draft a text of the model that the head was trained for."""
        if self._bound is None or self._bound[0] is not model:
            self._bound = model, BoundHead(self.module, self.token_ids, model)
        return _DraftHeadState(self._bound[1])

    def save(self, folder: Path | str) -> None:
        """Write the head to a new folder. Raises CheckpointError if it exists, or can't be written."""
        weights = dict(tree_flatten(self.module.parameters()))
        with atomic_new_folder(folder) as partial:
            sizes = {name: getattr(self.module.config, name) for name in _SIZES}
            write_json(partial / _CONFIG_FILE, {"model_type": MODEL_TYPE, "target": self.target, **sizes})
            safetensors.save_weights(partial, {**weights, _TOKEN_IDS: self.token_ids})

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read a head that `save` has written.

        Raises:
            CheckpointError: Names the file and what is wrong with it.
        """
        folder, hint = Path(folder), "a folder that `mlxlm draft` has written"
        file = folder / _CONFIG_FILE
        values = read_json_object(file, _MAX_CONFIG, CheckpointError, hint)
        if values.get("model_type") != MODEL_TYPE or not isinstance(values.get("target"), str):
            raise CheckpointError(f"{file} is not that of a draft head", hint)
        if wrong := [name for name in _SIZES if not is_number(values.get(name)) or values[name] <= 0]:
            raise CheckpointError(f"{file}: {wrong[0]} is {short_repr(values.get(wrong[0]))}", hint)
        try:
            module = MTPModule(ModelConfig(num_hidden_layers=1, **{name: values[name] for name in _SIZES}))
        except ConfigError as error:
            raise error.prefixed(str(file)) from None
        weights = safetensors.load_weights(folder)
        shapes = {name: x.shape for name, x in tree_flatten(module.parameters())}
        token_ids = weights.pop(_TOKEN_IDS, mx.zeros(0, mx.int32))
        found = {name: x.shape for name, x in weights.items()}
        if found != shapes or token_ids.ndim != 1 or token_ids.dtype != mx.int32 or not token_ids.size:
            wrong = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
            raise CheckpointError(f"{folder}: {(*wrong, _TOKEN_IDS)[0]} is missing or has another shape", hint)
        if token_ids.min().item() < 0 or token_ids.max().item() >= values["vocab_size"]:
            raise CheckpointError(f"{folder}: {_TOKEN_IDS} has tokens that the model doesn't have", hint)
        module.load_weights([(name, x.astype(mx.float32)) for name, x in weights.items()])
        mx.eval(module.parameters(), token_ids)
        return cls(module, token_ids, values["target"])


def is_draft_head(path: Path | str) -> bool:
    """Whether `path` is a folder with a draft head, by the model_type in its config.json."""
    file = Path(path) / _CONFIG_FILE
    return file.is_file() and read_json_object(file, _MAX_CONFIG, CheckpointError).get("model_type") == MODEL_TYPE


class BoundHead:
    """A module together with the model that it drafts for.

    Args:
        module: The module.
        token_ids: The tokens that it drafts, int32 `[N]`.
        model: The model.
    """

    def __init__(self, module: MTPModule, token_ids: mx.array, model: Decoder):
        self._step, self._embed = DecodeStep(module.bound_to(model, token_ids)), model.model.embed_tokens
        self._token_ids, self._vocab_size = token_ids[None], model.config.vocab_size

    def predict(self, hidden_states: mx.array, tokens: mx.array, cache: KVCache) -> tuple[mx.array, mx.array]:
        """Read tokens and the hidden states that they were drawn from.

        Args:
            hidden_states: `[T, hidden]`.
            tokens: int32 `[T]`.
            cache: That of the module.

        Returns:
            The hidden state after the last token, `[1, hidden]`, and the logits there, `[1, V]`.
        """
        logits = self._step(mx.concatenate([hidden_states, self._embed(tokens)], axis=-1)[None], [cache])[-1:]
        others = mx.full((1, self._vocab_size), -mx.inf, logits.dtype)
        assert self._step.hidden_states is not None  # an MTPModule has them
        return self._step.hidden_states[-1:], mx.put_along_axis(others, self._token_ids, logits, axis=1)


class _DraftHeadState:
    last_draft_matched: bool | None = None

    def __init__(self, head: BoundHead) -> None:
        self._head, self._cache = head, KVCache()
        # Tokens that are not read yet, and the hidden states that they were drawn from.
        self._unread: deque[tuple[Sequence[int], mx.array]] = deque()
        self._num_unread = 0
        self._num_guessed = 0  # positions of the cache that come from predicted hidden states

    @property
    def is_behind(self) -> bool:
        return self._num_unread > _LONGEST_ROUND

    def read(self, tokens: Sequence[int], hidden_states: mx.array | None = None) -> None:
        assert hidden_states is not None  # a Decoder has them
        self._cache.trim(self._num_guessed)
        self._num_guessed = 0
        self._unread.append((tokens, hidden_states))
        self._num_unread += len(tokens)
        while self._num_unread - len(self._unread[0][0]) >= MAX_UNREAD:
            self._num_unread -= len(self._unread.popleft()[0])

    def propose(self, count: int, sampler: Sampler, vocab_size: int) -> mx.array | None:
        hidden_states = mx.concatenate([states for _, states in self._unread])
        token = mx.array([token for tokens, _ in self._unread for token in tokens], mx.int32)
        self._unread.clear()
        self._num_unread = 0
        sampler, draft = sampler.fork(), list[mx.array]()
        while True:
            hidden_states, logits = self._head.predict(hidden_states, token, self._cache)
            token = sample_draft(logits, sampler)
            draft.append(token)
            if len(draft) == count or sampler.needs_last_token and sampler.ended:
                return mx.concatenate(draft)
            self._num_guessed += 1

    def close(self) -> None:
        pass
