"""A model that notes its calls, and that a test can stop at one of them."""

from dataclasses import replace
from threading import Event

from mlxlm.backend.mlx import tree_flatten
from mlxlm.model import Decoder

TIMEOUT = 20  # seconds; only a failing test waits this long


class Pause:
    """A call of a model, which waits until the test resumes it."""

    def __init__(self):
        self._reached, self._resumed = Event(), Event()

    def reach(self):
        """Wait until the model has come there."""
        assert self._reached.wait(TIMEOUT), "the model was not called"

    def resume(self):
        self._resumed.set()

    def hold(self):
        self._reached.set()
        assert self._resumed.wait(TIMEOUT), "the test has not resumed the model"

    def __enter__(self):
        """Stop the model until the end of the block."""
        self.reach()
        return self

    def __exit__(self, *_):
        self.resume()


class RecordingModel(Decoder):
    """A decoder that appends the shape of each call to `calls`, and the tokens to `tokens`."""

    def __init__(self, config):
        super().__init__(config)
        self._calls, self._tokens, self._pauses = [], [], {}

    @property
    def calls(self):
        return self._calls

    @property
    def tokens(self):
        return self._tokens

    def pause_at(self, call):
        """Stop before the call of this number, from 0. Returns the Pause."""
        self._pauses[call] = Pause()
        return self._pauses[call]

    def __call__(self, ids, cache=None):
        self._note(ids)
        return super().__call__(ids, cache=cache)

    def decode(self, ids, cache):
        if ids.ndim == 2:  # else it is a step, which may be compiled
            self._note(ids)
        return super().decode(ids, cache)

    def _note(self, ids):
        if len(self._calls) in self._pauses:
            self._pauses[len(self._calls)].hold()
        self._calls.append(tuple(ids.shape))
        self._tokens.append(ids.tolist() if ids.shape[1] > 1 else None)  # those of decoding steps aren't computed yet


def recording(lm, **changes):
    """`lm` with a RecordingModel of the same weights, and changes of the configuration that leave their shapes."""
    config = lm.config.with_changes(**changes)
    model = RecordingModel(config)
    model.load_weights(tree_flatten(lm.model.parameters()))
    return replace(lm, model=model, config=config)
