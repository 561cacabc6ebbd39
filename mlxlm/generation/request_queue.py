"""Requests that wait for a free row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlxlm.generation.context import common_prefix_length
from mlxlm.generation.prefill import MIN_SHARED_PREFIX
from mlxlm.generation.request import Request
from mlxlm.utils.errors import MlxlmError


class RequestQueue:
    """Takes requests from an iterable as they are needed, and numbers them from 0."""

    def __init__(self, requests: Iterable[Request | None], check: Callable[[Request], object]):
        """Wrap an iterable.

        Args:
            requests: None means that there is no request at the moment.
            check: Raises MlxlmError for a request that can't be served.
        """
        self._source = iter(requests)
        self._check = check
        self._num_received = 0
        self._waiting: list[tuple[int, Request]] = []
        self._source_ended = False

    def fill(self, size: int) -> list[tuple[int, MlxlmError]]:
        """Take requests until `size` wait, or none is left for now or for good.

        Returns:
            The number and the error of each request that can't be served.
        """
        rejected: list[tuple[int, MlxlmError]] = []
        while not self._source_ended and len(self._waiting) + len(rejected) < size:
            try:
                request = next(self._source)
            except StopIteration:
                self._source_ended = True
                break
            if request is None:
                break
            try:
                self._check(request)
            except MlxlmError as error:
                rejected.append((self._num_received, error))
            else:
                self._waiting.append((self._num_received, request))
            self._num_received += 1
        return rejected

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def exhausted(self) -> bool:
        """Whether no request waits and none will come."""
        return self._source_ended and not self._waiting

    def take(self, count: int) -> list[tuple[int, Request]]:
        """Remove up to `count` requests: the oldest, and those most like it in their beginning or length."""
        if not count or not self._waiting:
            return []
        oldest = self._waiting[0][1].prompt

        def distance(item: tuple[int, Request]) -> tuple[int, int, int]:
            number, request = item
            shared = common_prefix_length(oldest, request.prompt)
            # By powers of two: among prompts with the same system prompt, the length decides.
            rank = shared.bit_length() if shared >= MIN_SHARED_PREFIX else 0
            return -rank, abs(len(request.prompt) - len(oldest)), number

        self._waiting.sort(key=distance)
        taken, self._waiting = self._waiting[:count], sorted(self._waiting[count:], key=lambda item: item[0])
        return taken
