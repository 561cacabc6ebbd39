"""Accuracy of `mlxlm plan` and its probe: predicted and measured time and peak memory.

    python benchmarks/plan_accuracy.py TEXT [--presets 1m,5m,15m,50m] [--seconds 60]

For each preset and batch: the plan alone, the probe of three steps, and a run of about this many seconds with its
validation, each in its own process. The vocabulary is the preset's, but at most 4,096, so the printed parameter counts
are smaller than the presets'. Run it on an idle machine. The goals are 15% for time and 10% for memory after the probe.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import report

from mlxlm.utils.formatting import human_count

BATCHES = ((16, 256), (4, 512), (2, 1024))


def one(preset: str, batch: int, length: int, seconds: float, text: str) -> dict[str, float]:
    """Predicted and measured seconds and bytes of one run."""
    import time

    from mlxlm.data import Manifest, TokenDataset
    from mlxlm.families import load_preset
    from mlxlm.plan import Training, training_memory
    from mlxlm.tokenizer import load
    from mlxlm.train import Finished, TokenizerOptions, start_run, train
    from mlxlm.train.step_benchmark import probe

    config = load_preset(preset)
    # A short text supports only a small vocabulary; the embedding is then smaller than the preset's.
    shape = {"batch_size": batch, "max_seq_length": length, "eval_tokens": 4 * batch * length, "save_every": 0}
    with tempfile.TemporaryDirectory() as folder:
        settings = {**shape, "steps": 1, "eval_every": 0}
        vocab = min(config.vocab_size, 4096)
        draft = start_run(
            Path(folder, "draft"), [text], config, tokenizer=TokenizerOptions(vocab_size=vocab), settings=settings
        )
        held_out = TokenDataset.open(draft.data, "validation")
        results = probe(draft.config, draft.settings, held_out)
        steps = max(5, round(seconds / results.step))
        settings = {**shape, "steps": steps, "eval_every": max(1, steps // 2)}
        run = start_run(Path(folder, "run"), [draft.data], draft.config, settings=settings)
        forecast = results.forecast(run.settings, Manifest.read(run.data).validation.tokens)
        start = time.perf_counter()
        *_, ending = train(run, load(run.path))
        elapsed = time.perf_counter() - start
        assert isinstance(ending, Finished)
        planned = training_memory(draft.config, Training.from_settings(run.settings)).total
    return {
        "parameters": draft.config.parameter_count(), "steps": steps,
        "seconds_predicted": forecast.seconds, "seconds": elapsed,
        "memory_planned": planned, "memory_predicted": results.memory, "memory": ending.memory,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="a text file to train on")
    parser.add_argument("--presets", default="1m,5m,15m,50m")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--one", nargs=3, metavar=("PRESET", "BATCH", "LENGTH"))
    options = parser.parse_args()
    if options.one:
        preset, batch, length = options.one
        print(json.dumps(one(preset, int(batch), int(length), options.seconds, options.text)))
        return
    rows, results = [], []
    for preset in options.presets.split(","):
        for batch, length in BATCHES:
            command = [sys.executable, __file__, options.text, "--one", preset, str(batch), str(length)]
            command += ["--seconds", str(options.seconds)]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results.append({"preset": preset, "batch": batch, "length": length, **result})
            pairs = {"seconds": "seconds_predicted", "memory": "memory_predicted"}
            off = {name: 100 * (result[other] / result[name] - 1) for name, other in pairs.items()}
            alone = 100 * (result["memory_planned"] / result["memory"] - 1)
            rows.append(
                (
                    f"{preset} ({human_count(result['parameters'])}), {batch} x {length}",
                    f"time {off['seconds']:+.0f} % ({result['seconds']:.1f} s), memory {off['memory']:+.0f} % "
                    f"({result['memory'] / 1e6:.0f} MB), by the plan alone {alone:+.0f}%",
                )
            )
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    report("predicted and measured", rows, {"benchmark": "plan_accuracy", "runs": results})


if __name__ == "__main__":
    main()
