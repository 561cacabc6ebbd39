r"""CPU time to the loss of nanoGPT's recipe for small machines: nanoGPT, nanochat and mlxlm, one after another.

    git clone https://github.com/karpathy/nanoGPT; git clone https://github.com/karpathy/nanochat
    python benchmarks/time_to_loss.py TEXT... --nanogpt nanoGPT --nanochat nanochat [--python PYTHON]

Each text is trained on its first 90%, and evaluated on the rest, which chooses nothing.

- nanoGPT runs the recipe of its README for a CPU: 0.8M parameters, characters, 2,000 steps. Its loss is that of the
  last checkpoint, in windows of its 64 characters that move by half.
- nanochat trains a tokenizer of 2,048 tokens and its smallest model (depth 4, rows of 512 tokens, as in the example for
  a CPU in scripts/base_train.py, with 2,048 tokens in a step), and validates on the rest of the text every 50 steps.
  The CPU time is that of the first validation which is as good as nanoGPT, without the validations before; its
  documents are paragraphs of at least 500 characters.
- mlxlm gets half of nanoGPT's CPU time: `mlxlm pretrain TEXT --minutes M`, with nothing chosen by hand. Its loss is
  that of `mlxlm evaluate` with default windows.

CPU time is of all cores, for everything from the start of the first command to the end of the last, tokenizer
included, without the final evaluation. PYTHON is an interpreter with the requirements of both peers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import report
from small_text import evaluated, mlxlm, split

_NANOGPT = (
    "train.py config/train_shakespeare_char.py --dataset=text --out_dir=out --device=cpu --compile=False "
    "--eval_iters=20 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 "
    "--lr_decay_iters=2000 --dropout=0.0 --always_save_checkpoint=True"
)
_NANOCHAT = (
    "-m scripts.base_train --depth=4 --head-dim=64 --window-pattern=L --max-seq-len=512 --device-batch-size=4 "
    "--total-batch-size=2048 --core-metric-every=-1 --sample-every=-1 --eval-every=50"
)
# Runs in nanoGPT's folder: nats of all characters but the first, in windows that move by half
_EVALUATE = """
import sys, json, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load("out/ckpt.pt", map_location="cpu", weights_only=True)
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
ids = torch.from_numpy(np.fromfile("data/text/val.bin", np.uint16).astype(np.int64))
length, nats, done = saved["model_args"]["block_size"], 0.0, 1
with torch.no_grad():
    while done < len(ids):
        end = min(len(ids), done + (length // 2 if done > 1 else length))
        window = ids[max(0, end - length - 1) : end]
        logits = model(window[None, :-1], window[None, 1:])[0][0]
        nats += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")[done - end :].sum().item()
        done = end
print(json.dumps(nats))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--nanochat", type=Path)
    parser.add_argument("--nanochat-steps", type=int, default=1000)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    for text in options.texts:
        with tempfile.TemporaryDirectory() as folder:
            compare(text, Path(folder), options)


def compare(text: Path, folder: Path, options: argparse.Namespace) -> None:
    training, held_out = split(text, folder)
    nanogpt = train_nanogpt(training, held_out, folder, options)
    results = {"nanogpt": nanogpt}
    if options.nanochat:
        results["nanochat"] = train_nanochat(training, held_out, nanogpt["bits_per_byte"], folder, options)
    minutes = nanogpt["cpu_seconds"] / 2 / len(os.sched_getaffinity(0)) / 60
    before = child_seconds()
    mlxlm("pretrain", training, "--out", folder / "run", "--minutes", f"{minutes:.4f}")
    used = child_seconds() - before
    results["mlxlm"] = {"cpu_seconds": used, "bits_per_byte": evaluated(folder / "run", held_out)["bits_per_byte"]}
    rows = []
    for name, result in results.items():
        share = result["cpu_seconds"] / nanogpt["cpu_seconds"]
        rows.append((name, f"{result['bits_per_byte']:.3f} bits per byte, {result['cpu_seconds']:.0f} s ({share:.2f})"))
    report(
        f"{text.name}: CPU time, relative to nanoGPT's",
        rows,
        {"benchmark": "time_to_loss", "text": text.name, **results},
    )


def train_nanogpt(training: Path, held_out: Path, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    work = folder / "nanoGPT"
    shutil.copytree(options.nanogpt, work, ignore=shutil.ignore_patterns(".git"))
    data = work / "data/text"
    data.mkdir()
    parts = [path.read_text(encoding="utf-8") for path in (training, held_out)]
    characters = {character: i for i, character in enumerate(sorted(set("".join(parts))))}
    for name, part in zip(("train", "val"), parts, strict=True):
        np.array([characters[character] for character in part], np.uint16).tofile(data / f"{name}.bin")
    # Without meta.pkl, it takes GPT-2's vocabulary: the size is all that it reads from there
    code = f"import pickle; pickle.dump({{'vocab_size': {len(characters)}}}, open('data/text/meta.pkl', 'wb'))"
    subprocess.run([options.python, "-c", code], cwd=work, check=True)
    before = child_seconds()
    subprocess.run([options.python, *_NANOGPT.split()], cwd=work, check=True, stdout=sys.stderr)
    used = child_seconds() - before
    evaluated = subprocess.run([options.python, "-c", _EVALUATE], cwd=work, check=True, stdout=subprocess.PIPE)
    nats = json.loads(evaluated.stdout.splitlines()[-1])
    return {"cpu_seconds": used, "bits_per_byte": nats / math.log(2) / held_out.stat().st_size}


def train_nanochat(
    training: Path, held_out: Path, target: float, folder: Path, options: argparse.Namespace
) -> dict[str, float]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    base = folder / "nanochat"
    data = base / "base_data_climbmix"
    data.mkdir(parents=True)
    for number, path in enumerate((training, held_out)):
        texts = paragraphs(path.read_text(encoding="utf-8"))
        pq.write_table(pa.table({"text": texts}), data / f"shard_{number:05d}.parquet")
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "PYTHONUNBUFFERED": "1"}
    run = {"cwd": options.nanochat, "env": environment}
    before = child_seconds()
    tokenizer = [options.python, "-m", "scripts.tok_train", "--vocab-size", "2048"]
    subprocess.run(tokenizer, check=True, stdout=sys.stderr, **run)
    used, validation, best = child_seconds() - before, 0.0, math.inf
    eval_tokens = 2048 * max(1, held_out.stat().st_size // 3 // 2048)
    lengths = f"--num-iterations {options.nanochat_steps} --eval-tokens {eval_tokens}".split()
    with subprocess.Popen(
        [options.python, *_NANOCHAT.split(), *lengths], stdout=subprocess.PIPE, text=True, **run
    ) as process:
        last = 0.0  # CPU seconds at the last line: a validation takes those from the line before to its own
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            now = cpu_seconds(process.pid)
            if found := re.search(r"Validation bpb: ([0-9.]+)", line):
                validation, best = validation + now - last, min(best, float(found[1]))
                if best <= target:
                    process.kill()
                    break
            last = now
    return {"cpu_seconds": used + last - validation, "bits_per_byte": best}


def paragraphs(text: str) -> list[str]:
    """Return the text in parts of at least 500 characters that end with an empty line."""
    parts = [""]
    for block in re.split(r"(?<=\n\n)", text):
        if len(parts[-1]) >= 500:
            parts.append("")
        parts[-1] += block
    return parts


def child_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a running process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
