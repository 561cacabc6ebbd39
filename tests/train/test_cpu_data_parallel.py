"""Data parallelism over CPU cores."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mlxlm.backend import platform
from mlxlm.backend.blas import Blas, load_blas
from mlxlm.backend.mlx import ON_CPU, mx, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train import TrainSettings
from mlxlm.train import step as step_module
from mlxlm.train.cpu_data_parallel import CPUDataParallel
from mlxlm.train.events import TrainingWarning
from mlxlm.utils.json_files import read_json
from tests.train.training_runs import contents, finish

pytestmark = pytest.mark.skipif(not ON_CPU or not load_blas().sets_threads, reason="for a CPU and a BLAS with threads")


SHAPE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "vocab_size": 31, "tie_word_embeddings": True,
}  # fmt: skip


def batch(rows: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    segment_ids = np.sort(random.integers(0, 3, (rows, 20)), axis=1).astype(np.int32)
    weights = random.random((rows, 20), np.float32)
    return Batch(random.integers(0, 31, (rows, 21)).astype(np.int32), segment_ids, weights)


def trained(monkeypatch, parts: int, *, rows: int = 4, steps: int = 3, change=None, **settings):
    """Losses, norms and weights of a few steps in `parts`."""
    monkeypatch.setattr(step_module, "num_batch_shards", lambda batch_size: parts)
    model = Decoder(ModelConfig(**{**SHAPE, **(change or {})}), dropout=settings.get("dropout", 0.0))
    model.init_weights(0)
    step = step_module.TrainStep(
        model, TrainSettings(steps=10, learning_rate=1e-3, batch_size=rows, warmup_steps=0, **settings)
    )
    mx.random.seed(0)
    seen = []
    for i in range(steps):
        loss, norm, _ = step([batch(rows, 10 * i + j) for j in range(settings.get("grad_accumulation_steps", 1))], 1e-3)
        mx.eval(loss, norm, step.state)
        seen += [loss.item(), norm.item()]
    return seen, {name: np.array(x) for name, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize(
    ("parts", "rows", "options"),
    [
        (2, 4, {}),
        (2, 5, {}),  # parts of unequal length
        (3, 4, {"grad_accumulation_steps": 2}),
        (2, 4, {"grad_checkpoint": True}),
        (2, 4, {"change": {"positions": "alibi"}}),  # its slopes are an array outside of the model's state
    ],
)
def test_parts_equal_the_whole_batch(monkeypatch, parts, rows, options):
    whole, weights = trained(monkeypatch, 1, rows=rows, **options)
    cut, found = trained(monkeypatch, parts, rows=rows, **options)
    assert whole == pytest.approx(cut, rel=2e-6)
    for name, wanted in weights.items():
        np.testing.assert_allclose(found[name], wanted, atol=2e-6, err_msg=name)


def test_parts_are_deterministic(monkeypatch):
    first, weights = trained(monkeypatch, 2, dropout=0.3)
    again, found = trained(monkeypatch, 2, dropout=0.3)
    assert first == again
    assert all((found[name] == weights[name]).all() for name in weights)


def test_random_numbers_differ_by_part_and_step():
    state = {"weight": mx.zeros((3,))}
    mx.random.seed(7)
    draw = CPUDataParallel(lambda batches: mx.random.uniform(shape=(5,)), state, 2)
    rows = [{"x": np.zeros((2, 1))}]
    found = [np.array(x).tolist() for x in (*draw(rows), *draw(rows))]
    assert len({tuple(x) for x in found}) == 4
    mx.random.seed(7)
    assert [np.array(x).tolist() for x in (*draw(rows), *draw(rows))] == found


def test_error_in_a_thread():
    ended = []

    def function(batches):
        if len(batches[0]["x"]) == 1:
            raise ValueError("no such row")
        ended.append(True)
        return batches[0]["x"].sum()

    num_threads = load_blas()._thread_functions[0][1]
    before = num_threads()
    with pytest.raises(ValueError, match="no such row"):
        CPUDataParallel(function, {}, 2)([{"x": np.ones((3, 2))}])
    assert ended and num_threads() == before
    assert [x.item() for x in CPUDataParallel(function, {}, 2)([{"x": np.ones((4, 2))}])] == [4, 4]


def test_ctrl_c_waits_for_all_parts():
    ended, begun = [], threading.Event()

    def function(batches):
        begun.set()
        time.sleep(0.1)
        ended.append(True)
        return batches[0]["x"].sum()

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            CPUDataParallel(function, {}, 2)([{"x": np.ones((4, 2))}])
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ended) == 2


def test_blas_is_single_threaded():
    num_threads = load_blas()._thread_functions[0][1]
    seen = []

    def function(batches):
        seen.append(num_threads())
        return batches[0]["x"]

    CPUDataParallel(function, {}, 2)([{"x": np.ones((2, 2))}])
    assert seen == [1, 1]


def test_process_exit():
    code = (
        "import numpy as np\nfrom mlxlm.backend.mlx import mx\n"
        "from mlxlm.train.cpu_data_parallel import CPUDataParallel\n"
        "cut = CPUDataParallel(lambda batches: mx.exp(batches[0]['x']).sum() * 2, {}, 2)\n"
        "print([x.item() for x in cut([{'x': np.zeros((4, 2), np.float32)}])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[8.0, 8.0]\n", "")


def test_resume_with_other_cores_is_bit_equal(monkeypatch, new_run):
    monkeypatch.setattr(platform, "cpu_cores", lambda: 2)
    whole = new_run("whole", steps=6, eval_every=0, save_every=0)
    finish(whole)
    broken = new_run("broken", steps=6, eval_every=0, save_every=0)
    finish(broken, stop_at=3)
    monkeypatch.setattr(platform, "cpu_cores", lambda: 1)
    assert not [e for e in finish(broken, resume=True) if isinstance(e, TrainingWarning)]
    assert contents(whole.checkpoints()[-1]) == contents(broken.checkpoints()[-1])
    assert read_json(broken.checkpoints()[-1] / "state.json")["environment"]["parts"] == 2


def test_resume_with_another_blas_warns(monkeypatch, new_run):
    run = new_run("run", steps=4, eval_every=0)
    finish(run, stop_at=2)
    monkeypatch.setattr(step_module, "load_blas", lambda: Blas("other", None))
    warnings = [e.message for e in finish(run, resume=True) if isinstance(e, TrainingWarning)]
    assert len(warnings) == 1 and "products are computed by other, before by" in warnings[0]
