"""Model adapter for EleutherAI's lm-evaluation-harness (`pip install 'mlxlm[lm-eval]'`).

    python -m mlxlm.evaluate.lm_eval --model mlxlm --model_args path=MODEL --tasks hellaswag,arc_easy

This takes the options of the command `lm_eval`. In Python:

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

from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message
from mlxlm.evaluate.loglikelihood import Loglikelihood, LoglikelihoodScorer, start_token_id
from mlxlm.generation import GenerationOptions, Request, get_engine, load, run_batch

_MAX_LENGTH = 2048  # default limit of a text, in tokens: prompts are rarely longer
_MAX_TOKENS = 256  # to generate, if a task doesn't say

_Pair = tuple[tuple[str, str], list[int], list[int]]


@register_model("mlxlm")
class MlxlmModel(TemplateLM):
    """Any model that `mlxlm.load` takes.

    Texts start with the tokens that the tokenizer adds (BOS). Texts that are too long lose their beginning.

    Args:
        path: Of the model.
        batch_size: Texts to generate at a time ("auto": 32).
        max_length: Tokens of a text. None: the model's context, at most 2048.
        unused: lm_eval passes every model a device and a maximum batch size, which have no effect.

    Raises:
        ConfigError: There are other arguments, or `max_length` exceeds the model's context.
    """

    def __init__(self, path: str, batch_size: int | str = 32, max_length: int | None = None, **unused: Any):
        super().__init__()
        unknown = sorted(unused.keys() - {"device", "max_batch_size"})
        if unknown:
            raise ConfigError(f"unknown model arguments: {', '.join(unknown)}", "path, batch_size, max_length")
        self._loaded = load(path)
        self.tokenizer = self._loaded.tokenizer
        context = self._loaded.config.max_position_embeddings
        self.max_length = min(context, _MAX_LENGTH) if max_length is None else int(max_length)
        if not 2 <= self.max_length <= context:
            problem = f"max_length is {self.max_length}, and the model's context is {context}"
            raise ConfigError(problem, f"from 2 to {context}")
        self.batch_size = 32 if batch_size == "auto" else int(batch_size)
        self._scorer = LoglikelihoodScorer(self._loaded)
        self._chat: ChatTemplate | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos = self.tokenizer.eos_token_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return start_token_id(self._loaded)

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in lm_eval's cache."""
        return self.tokenizer.fingerprint

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the model's chat template.

        From then on, special tokens in texts are parsed, and none are added.
        """
        if self._chat is None:
            self._chat = ChatTemplate(self.tokenizer)
        messages = [Message(message["role"], message["content"]) for message in chat_history]
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text or a rendered conversation."""
        rendered = self._chat is not None
        special = not rendered if add_special_tokens is None else add_special_tokens
        return self.tokenizer.encode(string, add_special_tokens=special, parse_special=rendered)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text: every token is predicted once, in disjoint windows."""
        loglikelihoods = []
        for request in tqdm(requests, desc="loglikelihood_rolling", disable=disable_tqdm):
            [text] = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pairs = [make_disjoint_window(window) for window in windows]
            total = math.fsum(self._scorer.score(before, [after])[0].logprob for before, after in pairs)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            loglikelihoods.append(total)
        return loglikelihoods

    def _loglikelihood_tokens(self, requests: list[_Pair], disable_tqdm: bool = False, **_: Any) -> list[Loglikelihood]:
        results = [Loglikelihood(0.0, True)] * len(requests)
        prompts = [self._truncate(prompt, continuation) for _, prompt, continuation in requests]
        # Sorted prompts share prefixes, which are computed once.
        order = sorted((i for i, (_, _, ids) in enumerate(requests) if ids), key=prompts.__getitem__)
        with tqdm(total=len(order), desc="loglikelihood", disable=disable_tqdm) as bar:
            for prompt, group in groupby(order, key=prompts.__getitem__):
                indices = list(group)
                scores = self._scorer.score(prompt, [requests[i][2] for i in indices])
                for i, score in zip(indices, scores, strict=True):
                    results[i] = score
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], tuple(score))
                bar.update(len(indices))
        return results

    def _truncate(self, prompt: list[int], continuation: list[int]) -> list[int]:
        """The end of the prompt that fits `max_length` with all but the last token of the continuation."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ConfigError(f"a continuation has {len(continuation)} tokens", f"max_length above {self.max_length}")
        return prompt[-room:]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each prompt up to its first stop string, without it. Greedy, unless the task sets sampling."""
        texts = [""] * len(requests)
        batch = [self._request(*request.args) for request in requests]
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for i, result in run_batch(get_engine(self._loaded, batch_size=self.batch_size), batch):
                if isinstance(result, MlxlmError):
                    raise result
                texts[i] = result.text
                self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
                bar.update(1)
        return texts

    def _request(self, prompt: str, settings: dict[str, Any]) -> Request:
        settings = dict(normalize_gen_kwargs(settings, _MAX_TOKENS))
        until, max_tokens = settings.pop("until"), min(settings.pop("max_gen_toks"), self.max_length - 1)
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        options = GenerationOptions.of(max_tokens=max_tokens, stop=tuple(until), **settings)
        ids = self.tok_encode(prompt) or [self.prefix_token_id]
        return Request(ids[-(self.max_length - max_tokens) :], options)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
