"""The suite: golden pairs and answers, models that know nothing, know all or copy, intervals, and the command."""

import json
import math
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.data import Document
from mlxlm.evaluate.loglikelihood import Loglikelihood
from mlxlm.evaluate.suite import suite
from mlxlm.evaluate.suite.estimates import bootstrap, wilson
from mlxlm.evaluate.suite.minimal_pairs import minimal_pairs, phenomena
from mlxlm.evaluate.suite.predictions import Predictions, predict
from mlxlm.evaluate.suite.suite import SuiteSize, evaluate_suite, is_right
from mlxlm.evaluate.suite.tasks import TASKS
from mlxlm.report import read_run
from mlxlm.utils.errors import CheckpointError, DataError
from tests.report.test_page import make_run
from tests.run_command import run

# One pair of each template, checked by hand: in their order in minimal_pairs.json, with seed 0.
GOLDEN = """
The woman works in the park. | The woman work in the park.
The frog is in the store. | The frog are in the store.
The boy sees the pig. | The boy see the pig.
The small dog has a car. | The small dog have a car.
The farmer with the cows is tired. | The farmer with the cows are tired.
The boat of the friends is white. | The boat of the friends are white.
The farmer that sees the lions was old. | The farmer that see the lions was old.
The man that the cats know was tired. | The man that the cats know were tired.
Max saw that dog in the forest. | Max saw that dogs in the forest.
Sam wants that chair. | Sam wants those chair.
Mia has that pink key. | Mia has that pink keys.
Emma found a tired lion. | Emma found a tired lions.
The king washed himself in the street. | The king washed themselves in the street.
The woman helped herself in the house. | The woman helped themselves in the house.
Molly helped herself in the yard. | Molly helped himself in the yard.
Leo saw himself in the garden. | Leo saw herself in the garden.
No king has ever seen the horse. | Every king has ever seen the horse.
The friend did not see any birds in the house. | The friend did also see any birds in the house.
No sister that the brother hears has ever been to the school. | \
The sister that no brother hears has ever been to the school.
Lucy never saw any cows in the field. | Lucy often saw any cows in the field.
Ben knows what the girl carried in the yard. | Ben knows that the girl carried in the yard.
Bob knows that the boy brought the bag in the yard. | Bob knows what the boy brought the bag in the yard.
What did Anna find with the doll? | What did Anna find and the doll?
Whose doll did Lily find in the school? | Whose did Lily find doll in the school?
What did Tom see before Leo found the box? | What did Tom see the box before Leo found?
What did Anna say that Lucy brought? | What did Anna ask why Lucy brought?
The friend brought the picture in the school. | The friend fell the picture in the school.
The mother sneezed in the street. | The mother liked in the street.
Dan hoped that the cow was sad. | Dan told that the cow was sad.
Sam told Lucy that the monkey was happy. | Sam hoped Lucy that the monkey was happy.
The brother drew the chair. | The brother drawn the chair.
The woman has shaken the key. | The woman has shook the key.
The doctor bought the car. | The doctor buyed the car.
Tim saw three children in the garden. | Tim saw three childs in the garden.
Dan likes every pig in the street. | Dan likes both pig in the street.
Rosa did not have much rice. | Rosa did not have many rice.
Tim did not have many chairs. | Tim did not have much chairs.
There was a dog in the house. | There was each dog in the house.
Ben is good and Lily is too. | Ben is good and Lily can too.
Rosa can sing and Dan can too. | Rosa can sing and Dan is too.
Max has one brown cup and Lucy has three. | Max has one cup and Lucy has three brown.
Sam can swim and so can Anna. | Sam can swim and so is Anna.
The chair was forgotten by the girl. | The chair was forgot by the girl.
The ball was lifted by the sister. | The ball was lifting by the sister.
The farmer was kicking the hat. | The farmer was kicked the hat.
The car was made by the king. | The car was fell by the king.
There appears to be a bird in the school. | There hopes to be a bird in the school.
It seems that the monkey is in the garden. | It wants that the monkey is in the garden.
Anna is likely to play with Jack. | Anna is hard to play with Jack.
Anna is difficult to talk to. | Anna is going to talk to.
"""
SMALL = SuiteSize(4, 3, 8)
TEXT = "The quick brown fox jumps over the lazy dog. How are you today? " * 60


def test_golden_pairs():
    found = [pair for name, templates in phenomena().items() for pair in minimal_pairs(name, len(templates))]
    assert [f"{good} | {bad}" for good, bad in found] == GOLDEN.strip().splitlines()
    assert len(phenomena()) == 12


@pytest.mark.parametrize("name", phenomena())
def test_pairs_are_different_and_fewer_pairs_are_the_first_ones(name):
    pairs = minimal_pairs(name, 192)
    assert len(set(pairs)) == 192 and pairs[:48] == minimal_pairs(name, 48) and pairs != minimal_pairs(name, 192, 1)
    assert all(good != bad and re.fullmatch(r"[A-Z][A-Za-z ]+[.?]", good + bad[-1:][:0]) for good, bad in pairs)


def ngram_accuracy(pairs, sentences, order):
    """The accuracy of an n-gram model over words, trained on `sentences`."""
    counts, contexts = Counter(), Counter()

    def grams(sentence):
        tokens = ["^"] * (order - 1) + re.findall(r"\w+|[.?]", sentence.lower())
        return [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]

    for sentence in sentences:
        counts.update(grams(sentence))
        contexts.update(gram[:-1] for gram in grams(sentence))

    def logprob(sentence):
        return sum(math.log((counts[g] + 0.01) / (contexts[g[:-1]] + 3)) for g in grams(sentence))

    return sum(logprob(good) > logprob(bad) for good, bad in pairs) / len(pairs)


def test_agreement_across_attractors_needs_more_than_neighboring_words():
    sentences = [pair.good for pair in minimal_pairs("subject-verb agreement", 1000, seed=1)]
    simple, across = (minimal_pairs(name, 192) for name in list(phenomena())[:2])
    assert 0.4 < ngram_accuracy(simple, sentences, 1) < 0.6 and ngram_accuracy(simple, sentences, 2) > 0.8
    assert ngram_accuracy(across, sentences, 2) < 0.5


def solve(task, prompt):
    """The answer to the last question of a prompt."""
    question = prompt.splitlines()[-1]
    given = question.removesuffix(" =").split()
    if task == "copy":
        return " ".join(given)
    if task == "reversal":
        return " ".join(reversed(given))
    if task == "addition":
        return str(int(given[0]) + int(given[2]))
    if task == "key-value recall":
        *facts, (asked, *_) = re.findall(r"(\w+) has the ?(\w*)", question)
        return dict(facts)[asked] + "."
    stack = []
    for bracket in given:
        if bracket in "([{":
            stack.append(bracket)
        else:
            assert "([{".index(stack.pop()) == ")]}".index(bracket)
    return " ".join(")]}"["([{".index(bracket)] for bracket in reversed(stack))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_first_answer_is_right_and_chance_is_what_a_model_gets_that_ignores_the_question(task):
    rng = random.Random(0)
    for condition in task.conditions:
        items, right = task.items(condition, 64), 0
        assert items[:16] == task.items(condition, 16) and len({item.prompt for item in items}) == 64
        assert all(
            [a.strip() == solve(task.name, p) for a in answers] == [True] + [False] * (len(answers) - 1)
            for p, answers in items
        )
        for _, answers in items:
            for _ in range(20):  # bigram models with random weights
                weights = {}
                values = [
                    sum(weights.setdefault(pair, rng.gauss(0, 1)) for pair in pairwise(["", *a.split()]))
                    for a in answers
                ]
                right += values[0] == max(values)
        assert len({len(item.answers) for item in items}) == 1
        assert right / 64 / 20 == pytest.approx(
            task.chance, abs=4 * math.sqrt(task.chance * (1 - task.chance) / 64 / 5)
        )


def test_ties_are_wrong():
    assert is_right([Loglikelihood(-1.0, False), Loglikelihood(-2.0, False), Loglikelihood(-1.5, False)])
    assert not is_right([Loglikelihood(-1.0, False), Loglikelihood(-2.0, False), Loglikelihood(-1.0, False)])
    assert not is_right([Loglikelihood(-2.0, False), Loglikelihood(-1.0, False)])


class UniformScorer:
    """Every token has the same probability."""

    def __init__(self, lm):
        pass

    def token_logprobs(self, ids, start):
        return [-math.log(300)] * (len(ids) - start)

    def score(self, prompt, continuations):
        found = [self.token_logprobs([*prompt, *ids], len(prompt)) for ids in continuations]
        return [Loglikelihood(math.fsum(values), all(value > -1 for value in values)) for values in found]


class CopyScorer(UniformScorer):
    """Expects what followed the longest suffix of the context when it occurred before."""

    def token_logprobs(self, ids, start):
        text = "".join(map(chr, ids))
        logprobs = []
        for end in range(start, len(ids)):
            lengths = (n for n in range(min(end, 40), 0, -1) if text.find(text[end - n : end], 0, end - 1) >= 0)
            length = next(lengths, 0)
            place = text.rfind(text[end - length : end], 0, end - 1) + length
            expected = length and text[place] == text[end]
            logprobs.append(math.log(0.9 if expected else 0.1 / 300))
        return logprobs


def scores_of(lm, scorer, monkeypatch):
    monkeypatch.setattr(suite, "LoglikelihoodScorer", scorer)
    monkeypatch.setattr(suite, "predict", lambda *_: Predictions(*np.full((3, 8, 16), 0.5)))
    patient = replace(lm, config=lm.config.with_changes(max_position_embeddings=100_000))
    result = evaluate_suite(patient, replace(SMALL, items=8), documents=[])
    assert not result.left_out
    return {(score.name, score.condition, score.metric): score for score in result.scores}


def test_uniform_model(lm, monkeypatch):
    scores = scores_of(lm, UniformScorer, monkeypatch)
    for task in ("copy", "reversal", "bracket depth"):  # whose answers have as many tokens
        assert scores[task, "all", "accuracy"].estimate.value == 0
    assert scores["induction", "all", "loss reduction"].estimate.value == pytest.approx(0, abs=1e-12)
    byte_loss = scores["induction", "32 words", "bits per byte"].estimate.value
    assert byte_loss == scores["induction", "32 words", "bits per byte, repeated"].estimate.value
    assert 0.5 * math.log2(300) < byte_loss <= math.log2(300)  # a token has one to two bytes


def test_copying_model(lm, monkeypatch):
    scores = scores_of(lm, CopyScorer, monkeypatch)
    assert scores["key-value recall", "16 pairs", "accuracy"].estimate.value == 1
    assert scores["key-value recall", "16 pairs", "accuracy"].exact_match.value == 1
    assert scores["copy", "all", "accuracy"].estimate.value > 0.8
    assert scores["reversal", "all", "accuracy"].estimate.value < 0.6
    assert scores["induction", "32 words", "loss reduction"].estimate.value > 0.8


def test_sentences_are_scored_from_their_first_token_to_their_last(lm, logprobs):
    texts = ["The dog is in the park.", "How are you?", "a"]
    start = lm.tokenizer.prefix_token_ids or [suite.start_token_id(lm)]
    for text, found in zip(texts, suite._score_texts(lm, suite.LoglikelihoodScorer(lm), texts), strict=True):
        ids = lm.tokenizer.encode(text, add_special_tokens=False)
        assert found.logprob == pytest.approx(logprobs([*start, *ids])[0][len(start) - 1 :].sum(), rel=1e-4)


def test_predictions(lm, logprobs):
    found = predict(lm, [Document("text", iter([TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :]]))], 8)
    ids = lm.tokenizer.encode(TEXT, add_special_tokens=False)
    start = lm.tokenizer.prefix_token_ids or [suite.start_token_id(lm)]
    length = found.losses.shape[1]
    assert found.losses.shape[0] == 8 and length >= 16
    for row in (0, 5):
        logs, best = logprobs([*start, *ids[row * length : (row + 1) * length]])
        assert found.losses[row] == pytest.approx(-logs[len(start) - 1 :], rel=1e-3, abs=1e-3)
        assert (found.correct[row] == best[len(start) - 1 :]).all()
    right = found.correct == 1
    assert found.confidences[right] == pytest.approx(np.exp(-found.losses[right]), rel=1e-3)
    with pytest.raises(DataError, match="tokens, too few for the suite"):
        predict(lm, [Document("text", iter(["How are you?"]))], 8)

    class Broken:
        layers = lm.model.layers

        def __call__(self, ids):
            return lm.model(ids) * mx.nan

    with pytest.raises(CheckpointError, match="logits are NaN"):
        predict(replace(lm, model=Broken()), [Document("text", iter([TEXT]))], 8)


def test_calibration_and_loss_by_position():
    rng = np.random.default_rng(0)
    confidences = rng.uniform(size=(40, 100))
    calibrated = (rng.uniform(size=confidences.shape) < confidences).astype(float)
    halved = (rng.uniform(size=confidences.shape) < confidences / 2).astype(float)
    losses = np.tile(np.arange(100.0), (40, 1))
    assert Predictions(losses, confidences, calibrated).calibration_error().value < 0.03
    found = Predictions(losses, confidences, halved)
    error = found.calibration_error()
    assert error.low < error.value < error.high and error.value == pytest.approx(0.25, abs=0.02)
    assert found.bins().sum(axis=(0, 1)) == pytest.approx([4000, confidences.sum(), halved.sum()])
    by_position = {name: estimate.value for name, estimate in found.loss_by_position().items()}
    assert by_position == {
        "0": 0, "1": 1, "2 to 3": 2.5, "4 to 7": 5.5, "8 to 15": 11.5, "16 to 31": 23.5, "32 to 63": 47.5,
        "64 to 99": 81.5,
    }  # fmt: skip


@given(st.integers(1, 500), st.data())
def test_wilson_interval_ends_where_the_score_test_rejects(trials, data):
    successes = data.draw(st.integers(0, trials))
    found, z = wilson(successes, trials), NormalDist().inv_cdf(0.975)
    for end in (found.low, found.high):
        deviation = abs(found.value - end)
        assert deviation == pytest.approx(z * math.sqrt(end * (1 - end) / trials), abs=1e-6)
    assert found.low <= found.value <= found.high


def test_bootstrap_interval_is_that_of_a_mean():
    values = np.random.default_rng(1).normal(3, 2, size=400)
    found = bootstrap(values, lambda sums: sums / 400)
    half = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.2 * half)


def test_command(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "FAST", SMALL)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = "evaluate", folder, text, "--suite", "--fast"
    code, out, err = run(*command, "--json", "--plot", tmp_path / "plot.svg")
    found = json.loads(out)
    assert (code, found["pairs"], found["seed"]) == (0, 4, 0) and "</svg>" in (tmp_path / "plot.svg").read_text()
    assert {"copy, 16 words", "bracket depth, 8 open"} < set(found["left_out"])
    code, out, err = run(*command, "--seed", 1)
    assert code == 0 and "induction" in out and "too long for the model's context: copy, 8 words" in err
    for options, message in (
        (["--plot", tmp_path / "plot.svg"], "plot.svg already exists"),
        (["--plot", "plot"], "has no format (try: a name that ends with .png, .svg, .pdf)"),
        (["--stride", "3"], "--stride would have no effect: --suite has windows of its own"),
        (["--small-world"], "--small-world and --suite can't be combined"),
    ):
        code, out, err = run(*command, *options)
        assert code in (1, 2) and message in err
    assert "--fast would have no effect: --suite is not given" in run("evaluate", folder, text, "--fast")[2]


def test_checkpoints_of_a_run(folder, tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr(suite, "FAST", SMALL)
    path = make_run(tmp_path / "run", tiny_config)
    for file in folder.iterdir():
        shutil.copy(file, path)
    command = "evaluate", path, "--suite", "--fast", "--seed"
    assert "has no checkpoint yet" in run(*command, 0)[2]
    for step in (10, 30):
        checkpoint = path / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        shutil.copy(folder / "model.safetensors", checkpoint)
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "validation_loss": 1 / step}))
    code, out, err = run(*command, 0)
    assert code == 0 and out.startswith("best checkpoint: step 30\n") and re.search(r"step 10 +step 30\n", out)
    history = read_run(path)
    assert [point.step for point in history.suite["grammar (accuracy)"]] == [10, 30]
    assert "grammar (accuracy)" in (path / "report.html").read_text()
    shutil.rmtree(path / "checkpoints/step-10")
    run(*command, 0)
    assert len(read_run(path).suite["copy (accuracy)"]) == 2  # the scores of a deleted checkpoint stay
    found = json.loads(run(*command, 1, "--json")[1])
    assert found["step"] == 30 and list(found["checkpoints"]) == ["30"]
    assert len(read_run(path).suite["copy (accuracy)"]) == 1  # other items can't be compared
    (path / "suite.json").write_text(
        '{"checkpoints": {"x": [], "7": [3, {"condition": "all", "estimate": {}}], "8": 1}}'
    )
    assert list(read_run(path).suite) == ["None (None)"]
