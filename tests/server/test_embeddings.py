"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from mlxlm.generation import embed


@pytest.fixture
def embeddings(client):
    return lambda **fields: client.post("/v1/embeddings", json=fields).json()


def test_several_texts(embeddings, client):
    answer = embeddings(input=["The quick brown fox", "How are you?"])
    vectors = np.array([entry["embedding"] for entry in answer["data"]])
    assert [entry["index"] for entry in answer["data"]] == [0, 1] and answer["model"] == "tiny"
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] < 0.999
    ids = client.post("/tokenize", json={"prompt": "The quick brown fox"}).json()["tokens"]
    np.testing.assert_allclose(embeddings(input=ids)["data"][0]["embedding"], vectors[0], atol=1e-6)
    assert answer["usage"]["prompt_tokens"] > len(ids)


def test_base64(embeddings):
    [plain], [encoded] = (embeddings(input="a", encoding_format=form)["data"] for form in ("float", "base64"))
    decoded = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, plain["embedding"], rtol=1e-6)


def test_dimensions(embeddings, lm):
    [entry] = embeddings(input="How are you?", dimensions=5)["data"]
    np.testing.assert_allclose(entry["embedding"], embed(lm, "How are you?", dimensions=5), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 5000}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": ["a", ""]}, "input.1"),
    ],
)
def test_invalid_fields(embeddings, fields, param):
    assert embeddings(**fields)["error"]["param"] == param


def test_long_input(embeddings):
    assert "tokens" in embeddings(input="fox " * 5000)["error"]["message"]
