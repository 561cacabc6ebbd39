"""A model for EleutherAI's lm-evaluation-harness (`pip install 'mlxlm[lm-eval]'`).

    python -m mlxlm.evaluate.lm_eval --model mlxlm --model_args path=MODEL --tasks hellaswag,arc_easy

takes what the command `lm_eval` takes; and in Python:

    import lm_eval
    from mlxlm.evaluate.lm_eval import MlxlmModel

    lm_eval.simple_evaluate(MlxlmModel("MODEL"), tasks=["hellaswag"])
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

from mlxlm.utils.errors import ConfigError, MlxlmError, PlatformError

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise PlatformError(f"the lm-evaluation-harness can't be used: {error}", "pip install 'mlxlm[lm-eval]'") from error

from mlxlm.chat.chat_template import ChatTemplate, Message
from mlxlm.evaluate.loglikelihood import LoglikelihoodScorer
from mlxlm.generation import GenerationOptions, Request, load, run_batch

_LONGEST = 2048  # tokens of a text, unless asked for: a task's prompts rarely are longer
_NEW = 256  # tokens, where a task says nothing
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

_Pair = tuple[tuple[str, str], list[int], list[int]]


@register_model("mlxlm")
class MlxlmModel(TemplateLM):
    """Any model that `mlxlm.load` takes. Texts begin with what the tokenizer puts in front of them (BOS), and one that
    is too long loses its beginning."""

    def __init__(self, path: str, batch_size: int | str = 32, max_length: int | None = None, **unused: Any):
        """batch_size: texts that are generated side by side ("auto": 32). max_length: tokens of a text (default: the
        model's context, at most 2048).

        `unused`: lm_eval hands every model a device and a largest batch size, which mean nothing here. Raises
        ConfigError for any other argument, and what `mlxlm.load` raises.
        """
        super().__init__()
        unknown = sorted(unused.keys() - {"device", "max_batch_size"})
        if unknown:
            raise ConfigError(f"unknown model arguments: {', '.join(unknown)}", "path, batch_size, max_length")
        self._loaded = load(path)
        self.tokenizer = self._loaded.tokenizer
        most = self._loaded.config.max_position_embeddings
        self.max_length = min(most, _LONGEST) if max_length is None else int(max_length)
        if not 2 <= self.max_length <= most:
            raise ConfigError(f"max_length is {self.max_length}, and the model reads {most}", f"from 2 to {most}")
        self.batch_size = 32 if batch_size == "auto" else int(batch_size)
        self._continuations = LoglikelihoodScorer(self._loaded)
        self._chat: ChatTemplate | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ids = self.tokenizer.eos_id, self.tokenizer.bos_id, *sorted(self._loaded.eos_token_ids)
        found = next((id for id in ids if id is not None), None)
        if found is None:
            raise ConfigError("the tokenizer has neither a BOS nor an EOS token", "another model")
        return found

    @property
    def prefix_token_id(self) -> int:
        """What a text without a beginning is behind."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.fingerprint

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template renders it. From here on special tokens in a text are what they
        look like, and none is put in front."""
        if self._chat is None:
            self._chat = ChatTemplate(self.tokenizer)
        messages = [Message(message["role"], message["content"]) for message in chat_history]
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        rendered = self._chat is not None
        special = not rendered if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_special_tokens=special, parse_special=rendered)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Of each whole text, every token predicted once, from as many as fit before it in disjoint windows."""
        found = []
        for request in tqdm(requests, desc="loglikelihood_rolling", disable=disable_tqdm):
            [text] = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs = [make_disjoint_window(window) for window in windows]
            total = math.fsum(self._continuations.score(before, [after])[0].logprob for before, after in pairs)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            found.append(total)
        return found

    def _loglikelihood_tokens(self, requests: list[_Pair], disable_tqdm: bool = False, **_: Any):
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        prompts = [self._shortened(prompt, continuation) for _, prompt, continuation in requests]
        # Prompts that begin alike follow each other: what they share is read once.
        order = sorted((i for i, (_, _, ids) in enumerate(requests) if ids), key=prompts.__getitem__)
        with tqdm(total=len(order), desc="loglikelihood", disable=disable_tqdm) as bar:
            for prompt, group in groupby(order, key=prompts.__getitem__):
                places = list(group)
                likelihoods = self._continuations.score(prompt, [requests[i][2] for i in places])
                for i, likelihood in zip(places, likelihoods, strict=True):
                    found[i] = tuple(likelihood)
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                bar.update(len(places))
        return found

    def _shortened(self, prompt: list[int], continuation: list[int]) -> list[int]:
        """The end of the prompt, so much that all but the last token of the continuation fits behind it."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(f"a continuation has {len(continuation)} tokens", f"max_length above {self.max_length}")
        return prompt[-room:]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Each prompt continued up to the first of its stop strings, which is left out. Greedy, unless a task asks for
        sampling."""
        found = [""] * len(requests)
        asked = [self._request(*request.args) for request in requests]
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for i, result in run_batch(self._loaded, asked, batch_size=self.batch_size):
                if isinstance(result, MlxlmError):
                    raise result
                found[i] = result.text
                self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
                bar.update(1)
        return found

    def _request(self, prompt: str, settings: dict[str, Any]) -> Request:
        settings = dict(normalize_gen_kwargs(settings, _NEW))
        until, new = settings.pop("until"), min(settings.pop("max_gen_toks"), self.max_length - 1)
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        unknown = sorted(settings.keys() - set(_SAMPLING))
        if unknown:
            raise ConfigError(f"unknown generation settings: {', '.join(unknown)}", ", ".join(_SAMPLING))
        options = GenerationOptions.of(max_tokens=new, stop=tuple(until), **settings)
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        return Request(ids[-(self.max_length - new) :], options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
