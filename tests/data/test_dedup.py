"""Near-duplicates: estimates beside true similarities, planted repetitions, what is counted and what stays."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import DataOptions, Document, TokenDataset, prepare
from mlxlm.data.dedup import NUM_HASHES, DuplicateFilter, MinHash, MinHashLSH
from mlxlm.utils.errors import DataError

VOCABULARY = [f"word{i}" for i in range(5000)]


def signature(text, cuts=()):
    minhash = MinHash()
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        minhash.add(text[start:stop])
    return minhash.signature(b"12345678")


def estimate(a, b):
    return float((signature(a) == signature(b)).mean())


def similarity(a, b):
    """The Jaccard similarity of the sets of five words, in lower case."""
    one, other = ({tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (a.lower().split(), b.lower().split()))
    return len(one & other) / len(one | other)


def words(draw, n):
    return draw.choices(VOCABULARY, k=n)


def changed(draw, text, share):
    """`text` with a run of its words, that share of them, replaced."""
    old = text.split()
    n = round(share * len(old))
    at = draw.randrange(len(old) - n + 1)
    return " ".join(old[:at] + words(draw, n) + old[at + n :])


def run(texts, threshold):
    unique = DuplicateFilter(threshold)
    kept = ["".join(d.pieces) for d in unique(Document(f"{i}", iter([t] if t else [])) for i, t in enumerate(texts))]
    return kept, unique.stats


def test_similarity_estimates_have_the_expected_deviation():
    draw = random.Random(0)
    errors = []
    for share in (0.02, 0.1, 0.2, 0.4, 0.7) * 20:
        a = " ".join(words(draw, 300))
        b = changed(draw, a, share)
        true = similarity(a, b)
        errors.append((estimate(a, b) - true) / max((true * (1 - true) / NUM_HASHES) ** 0.5, 1e-9))
    assert abs(np.mean(errors)) < 0.35 and 0.8 < np.std(errors) < 1.25


@given(
    text=st.text(st.sampled_from("ab 東\n.é"), max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5).map(sorted)
)
@settings(max_examples=40)
def test_signature_does_not_depend_on_pieces(text, cuts):
    cuts = [cut for cut in cuts if cut <= len(text)]
    assert (signature(text, cuts) == signature(text)).all()


def test_words_of_any_language_and_none():
    assert estimate("The cat, SAT on (a) mat!", "the cat sat on a mat") == 1
    assert estimate("我喜欢吃苹果和香蕉", "我喜欢吃苹果和葡萄") > 0.3  # characters, not one long word
    assert estimate("a b", "a b") == 1 and estimate("a b", "b a") < 0.2
    one, other = MinHash(), MinHash()
    assert (one.signature(b"12345678") != other.signature(b"12345679")).any()  # "" and "???"


def test_long_words_are_cut_to_bound_memory():
    minhash = MinHash()
    for _ in range(40):
        minhash.add("x" * 10_000)
        assert len(minhash._pending) <= 1 << 16
    assert len(np.unique(minhash.signature(b"12345678"))) > 100


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_duplicates_are_removed(threshold):
    draw = random.Random(1)
    margin = 2.5 * (threshold * (1 - threshold) / NUM_HASHES) ** 0.5
    texts, near, far = [], 0, 0
    for _ in range(50):
        a = " ".join(words(draw, 400))
        texts.append(a)
        b = changed(draw, a, (1 - threshold) * draw.choice([0.05, 1.5]))
        texts.append(b)
        near += similarity(a, b) >= threshold + margin
        far += similarity(a, b) < threshold - margin
    kept, found = run(texts, threshold)
    assert found.documents == 100 and found.exact == 0
    assert 0.97 * near <= found.near <= 50 - 0.97 * far
    assert near > 12 and far > 12
    assert kept[0] == texts[0] and set(texts[::2]) <= set(kept)  # the first of each pair stays
    assert found.bytes == sum(map(len, texts)) - sum(map(len, kept))


def test_exact_and_near_duplicates_are_counted_separately():
    text = "the river and the green water of the stone"
    kept, found = run([text, text, text.upper(), text + ".", "", "?", "?", "another text of some words here"], 0.99)
    assert kept == [text, "", "?", "another text of some words here"]
    assert (found.documents, found.exact, found.near, found.fraction) == (8, 2, 2, 0.5)


def test_index_keeps_its_texts_when_it_grows():
    draw = random.Random(2)
    texts = [" ".join(words(draw, 20)) for _ in range(1100)]
    index = MinHashLSH(0.8)
    assert all(index.add(signature(text), b"%8d" % i) is None for i, text in enumerate(texts))
    for i in range(0, 1100, 50):
        assert index.add(signature(texts[i]), b"%8d" % i) == "exact"
        assert index.add(signature(texts[i]), b"another!") == "near"


def test_prepare_removes_and_counts_duplicates(byte_level, text, tmp_path):
    texts = [f"{i} {text(80, i)}" for i in range(60)]
    rows = [*texts, texts[3], texts[5] + " and", *texts[:10]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in (texts[7], text(90, 99))))
    chat = [{"messages": [{"role": "user", "content": text(30)}, {"role": "assistant", "content": "water"}]}] * 2
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    sources = [tmp_path / "a.jsonl", tmp_path / "c.jsonl"]
    manifest = prepare(DataOptions(sources, dedup=0.8, validation=[tmp_path / "b.jsonl"]), byte_level, tmp_path / "out")
    found = manifest.dedup
    assert (found.documents, found.exact, found.near, found.threshold) == (76, 13, 1, 0.8)
    assert manifest.train.documents == 61 and manifest.validation.documents == 1
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["dedup"]["fraction"] == 14 / 76
    assert TokenDataset.open(tmp_path / "out", "train").manifest == manifest
    again = prepare(DataOptions(sources, dedup=0.8, validation=[tmp_path / "b.jsonl"]), byte_level, tmp_path / "again")
    assert again == manifest


def _documents(texts):
    return [Document(str(i), iter((text,))) for i, text in enumerate(texts)]


def test_threshold_of_one_removes_exact_duplicates_only():
    words = [f"w{i}" for i in range(400)]
    texts = [" ".join([*words[:200], f"other{n}", *words[200:]]) for n in range(200)]  # Jaccard 0.975 with each other
    unique = DuplicateFilter(1)
    assert len(list(unique(_documents([*texts, *texts])))) == 200
    assert (unique.stats.exact, unique.stats.near) == (200, 0)


def test_duplicates_in_crowded_buckets_are_found():
    words = " ".join(f"w{i}" for i in range(60))
    texts = [f"{words} end{n} of{n} this{n}" for n in range(120)]
    unique = DuplicateFilter(0.999)
    kept = len(list(unique(_documents(texts))))
    list(unique(_documents(texts)))
    assert unique.stats.exact + unique.stats.near == 240 - kept
    assert unique.stats.exact >= kept


def test_a_source_of_duplicates_only_is_an_error(tmp_path, byte_level):
    (tmp_path / "a.txt").write_text("one and the same text " * 50)
    with pytest.raises(DataError, match="repeat earlier ones"):
        prepare(DataOptions([tmp_path / "a.txt"] * 2, weights=[0.5, 0.5], dedup=0.8), byte_level, tmp_path / "out")
