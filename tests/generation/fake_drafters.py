"""For tests: a drafter that knows the text to come, a model that nearly agrees with another, and a greedy sampler."""

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder


class Greedy:
    """A sampler that draws the most likely token."""

    needs_last_token = False

    def __call__(self, logits):
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def fork(self):
        return self


class Oracle:
    """Proposes the text that is to come, with every `wrong`-th token (0: none) another one; at most `count` a time."""

    last_draft_matched, is_behind = None, False

    def __init__(self, text, wrong=0):
        self.text, self.wrong, self.position = text, wrong, 0

    def begin(self, model, kv, prompt):
        self.position = 0
        return self

    def check(self, lm):
        pass

    def read(self, known, hidden_states=None):
        for token in known:
            if self.position < len(self.text):  # behind its end, more may be drawn before it is closed
                assert token == self.text[self.position]
            self.position += 1

    def propose(self, count, sampler, vocab_size):
        rows = range(self.position, min(self.position + count, len(self.text)))
        guesses = [(self.text[i] + (1 if self.wrong and i % self.wrong == 0 else 0)) % vocab_size for i in rows]
        return mx.array(guesses, mx.int32) if guesses else None

    def close(self):
        self.closed = True


class FixedLength:
    """A DraftLengthController that always chooses `count`."""

    reason = None

    def __init__(self, count):
        self.count = count

    def next_draft_length(self):
        return self.count

    def record_acceptance(self, accepted, rejected):
        pass

    def record_time(self, proposals, seconds):
        pass


def always(drafter, count):
    """A SpeculativeDecoder that always drafts `count` tokens."""
    speculation = SpeculativeDecoder(drafter, num_draft_tokens=count)
    speculation._draft_lengths = [FixedLength(count)]
    return speculation


def perturbed(model, share):
    """A model that agrees with `model` often, not always."""
    other = Decoder(model.config)
    noise = iter(mx.random.split(mx.random.key(1), 100))
    other.update(tree_map(lambda w: w * (1 + share * mx.random.normal(w.shape, key=next(noise))), model.parameters()))
    mx.eval(other.parameters())
    return other
