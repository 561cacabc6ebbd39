"""Short greedy texts, which verification generates with both models."""

import pytest


@pytest.fixture(autouse=True)
def few_greedy_tokens(monkeypatch):
    monkeypatch.setattr("mlxlm.convert.verify.NUM_GREEDY_TOKENS", 8)
