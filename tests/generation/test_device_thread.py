"""The thread of the device: functions and steps in turn, and processes that exit while it works."""

import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from mlxlm.generation import device_thread
from tests.paths import ROOT


def test_results_and_errors_of_a_function():
    assert device_thread.run(lambda: threading.current_thread().name) == "mlxlm"
    assert device_thread.run(lambda: device_thread.run(lambda: 3)) == 3
    with pytest.raises(ZeroDivisionError):
        device_thread.run(lambda: 1 // 0)


def test_steps_take_turns():
    order, done = [], threading.Event()

    def counting(name, steps):
        left = iter(range(steps))

        def step():
            order.append(name)
            goes_on = next(left, None) is not None
            if name == "b" and not goes_on:
                done.set()
            return goes_on

        return step

    def both():
        device_thread.repeat(counting("a", 2))
        device_thread.repeat(counting("b", 3))

    device_thread.run(both)
    assert done.wait(20)
    assert "".join(order) == "abababb"


SETUP = """
import asyncio, sys, threading
from pathlib import Path
from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm import generate, stream
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from mlxlm.tokenizer import train
config = ModelConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     intermediate_size=64, vocab_size=300, max_position_embeddings=4096)
model = Decoder(config)
model.init_weights(seed=1)
mx.eval(model.parameters())
lm = LoadedModel(model, train(["the cat sat on a mat " * 20], 270), config, Path("."))
options = {"temperature": 1.0, "seed": 1, "logit_bias": {lm.tokenizer.eos_token_id: -1000}}
"""
PROGRAMS = {
    "a text in a thread": """
thread = threading.Thread(target=generate, args=(lm, "the"), kwargs={"max_tokens": 9, **options})
thread.start()
thread.join()
""",
    "asyncio.to_thread": """
async def main():
    await asyncio.gather(*(asyncio.to_thread(generate, lm, "the", max_tokens=9, **options) for _ in range(3)))
asyncio.run(main())
""",
    "in the middle of a text": """
text = stream(lm, "the", max_tokens=4000, **options)
next(text)
""",
    "in the middle of a text that a thread waits for": """
text = stream(lm, "the", max_tokens=4000, **options)
next(text)
threading.Thread(target=text.result, daemon=True).start()
sys.exit()
""",
    "in the middle of async for": """
async def main():
    async for chunk in stream(lm, "the", max_tokens=4000, **options):
        return
asyncio.run(main())
""",
}


def test_processes_exit_cleanly():
    command = [sys.executable, "-W", "error", "-c"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = {name: subprocess.Popen([*command, SETUP + program], **pipes) for name, program in PROGRAMS.items()}
    try:
        outputs = {name: process.communicate(timeout=60) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    assert outputs == dict.fromkeys(PROGRAMS, ("", ""))
    assert {name: process.returncode for name, process in processes.items()} == dict.fromkeys(PROGRAMS, 0)


def test_a_step_that_has_ended_is_freed():
    class Model:
        pass

    model, freed = Model(), threading.Event()
    watched = weakref.ref(model, lambda _: freed.set())
    device_thread.run(partial(id, model))
    del model
    assert freed.wait(10) and watched() is None
