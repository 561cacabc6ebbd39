"""A model whose logits are far apart, with its tokenizer, in memory and as a folder."""

import pytest

from mlxlm.backend.mlx import mx
from tests.generation.conftest import lm  # noqa: F401
from tests.small_models import write_folder


@pytest.fixture(scope="session")
def folder(lm, tmp_path_factory):  # noqa: F811
    """`lm`, as a checkpoint."""
    return write_folder(tmp_path_factory.mktemp("evaluated"), lm.model, lm.config, lm.tokenizer)


@pytest.fixture(scope="session")
def logprobs(lm):  # noqa: F811
    """`logprobs(ids)`: log p of each id but the first, in float64, from one pass over all of them."""
    import numpy as np

    def found(ids):
        logits = np.array(lm.model(mx.array([list(ids)]))[0], dtype=np.float64)
        top = logits.max(-1, keepdims=True)
        logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return logs[np.arange(len(ids) - 1), list(ids[1:])], logs[:-1].argmax(-1) == np.array(ids[1:])

    return found
