"""The adapter for the lm-evaluation-harness, through the harness itself on a task made here."""

import json
import subprocess
import sys

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval (pip install 'mlxlm[lm-eval]')")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from mlxlm.evaluate.lm_eval import MlxlmModel  # noqa: E402
from mlxlm.evaluate.multiple_choice import Question, evaluate_multiple_choice  # noqa: E402
from mlxlm.utils.errors import ConfigError  # noqa: E402

SHOT = "The quick brown fox jumps over the lazy dog. "
ROWS = [
    {"q": SHOT * 2 + "How are", "choices": ["you", "fox", "世"], "gold": 0},
    {"q": SHOT + "Grüße,", "choices": ["世界!", "lazy dog"], "gold": 1},
    {"q": "quick", "choices": ["brown", "dog", "today? How are you today?"], "gold": 2},
]


def instances(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(arguments)]


@pytest.fixture(scope="module")
def model(folder):
    return MlxlmModel(str(folder), max_length=64)


def test_loglikelihoods(model, lm, logprobs):
    pairs = [(row["q"], " " + choice) for row in ROWS for choice in row["choices"]]
    pairs += [("", "How are you?"), ((SHOT * 30).strip(), " lazy dog"), (SHOT.strip(), "")]
    found = model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        after = len(lm.tokenizer.encode(context + continuation)) - len(lm.tokenizer.encode(context))
        logs, best = logprobs(lm.tokenizer.encode(context + continuation)[-65:])
        assert logprob == pytest.approx(logs[len(logs) - after :].sum(), rel=1e-4, abs=1e-3)
        assert greedy == best[len(best) - after :].all()


def test_whole_texts(model, lm, logprobs):
    text = SHOT * 9
    ids = lm.tokenizer.encode(text)
    total = logprobs(ids[:65])[0].sum()
    for done in range(64, len(ids) - 1, 64):
        new = min(64, len(ids) - 1 - done)
        end = done + 1 + new
        total += logprobs(ids[end - 65 : end])[0][-new:].sum()
    [found] = model.loglikelihood_rolling(instances("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert found == pytest.approx(total, rel=1e-4)


def test_generation(model, lm):
    from mlxlm import generate

    whole = generate(lm, "How are", max_tokens=12, temperature=0).text
    assert len(whole) > 3
    asked = ("How are", {"until": [], "max_gen_toks": 12}), ("How are", {"until": [whole[2]], "max_tokens": 12})
    found = model.generate_until(instances("generate_until", *asked), disable_tqdm=True)
    assert found == [whole, whole[: whole.index(whole[2])]]
    # Of a prompt that is too long the end stays, with room for what comes.
    end = lm.tokenizer.encode(SHOT * 30)[-59:]
    expected = generate(lm, end, max_tokens=5, temperature=0, stop=("x",)).text
    asked = (SHOT * 30, {"until": "x", "max_gen_toks": 5})
    assert model.generate_until(instances("generate_until", asked), disable_tqdm=True) == [expected]
    with pytest.raises(ConfigError, match="unknown generation settings: beams"):
        model.generate_until(instances("generate_until", ("a", {"until": [], "beams": 2})))


def test_arguments(folder):
    with pytest.raises(ConfigError, match="unknown model arguments: dtype"):
        MlxlmModel(str(folder), dtype="float16", device="cpu")
    with pytest.raises(ConfigError, match="max_length is 129, and the model's context is 128"):
        MlxlmModel(str(folder), max_length=129)


TASK = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: acc_bytes}}]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK.format(data=data))
    return tmp_path / "tasks"


def test_a_task_of_the_harness_agrees_with_our_choices(model, lm, task):
    manager = TaskManager(include_path=str(task), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=["tiny_choices"], task_manager=manager, bootstrap_iters=0)
    ours = list(
        evaluate_multiple_choice(lm, [Question(i, r["q"], r["choices"], r["gold"], "") for i, r in enumerate(ROWS)])
    )
    scores = found["results"]["tiny_choices"]
    assert scores["acc,none"] == pytest.approx(sum(one.predicted == one.answer for one in ours) / 3)
    assert scores["acc_bytes,none"] == pytest.approx(sum(one.predicted_by_bytes == one.answer for one in ours) / 3)
    for sample in found["samples"]["tiny_choices"]:
        logprobs = [response[0] for response in sample["filtered_resps"]]
        assert logprobs == pytest.approx(ours[sample["doc_id"]].logprobs, rel=1e-4)


def test_the_documented_command(folder, task):
    command = [
        sys.executable,
        "-m",
        "mlxlm.evaluate.lm_eval",
        "run",
        "--model",
        "mlxlm",
        "--model_args",
        f"path={folder}",
    ]
    done = subprocess.run(
        [*command, "--tasks", "tiny_choices", "--include_path", task], capture_output=True, timeout=120, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choices" in done.stdout and "acc_bytes" in done.stdout
