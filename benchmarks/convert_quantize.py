"""Loading, converting and quantizing, compared with mlx_lm.convert: time, peak memory, KL divergence.

    python benchmarks/convert_quantize.py speed   [--preset 1b] [--rounds 2]
    python benchmarks/convert_quantize.py quality [--model DIR] [--text FILE] [--eval-text FILE] [--peers ...]
    python benchmarks/convert_quantize.py gguf --text FILE [--model DIR] [--eval-text FILE]

`speed` writes a bfloat16 checkpoint with random weights in shards of 500 MB and runs each command in a fresh
process, in turn. "Read" reads the checkpoint's bytes once, from the same (warm) page cache as the others.
`quality` quantizes one trained model at 4.5, 3.5 and 2.5 bits per weight with mlxlm's methods, with mlx_lm's commands,
which calibrate on the same text, and with llama.cpp's K-quants and importance weights, and compares each result with
the source on the same held-out text; without --model a small one is trained, about two minutes. `gguf` writes GGUF
files without importance weights and with those that --text gives, compares each with the source, and counts the tensors
that are those of llama.cpp's quantizer, to the byte.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from common import in_turn, median, report, spread, timed_command

MLXLM = [str(Path(sys.executable).with_name("mlxlm"))]
MLX_LM = [sys.executable, "-m", "mlx_lm", "convert"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["speed", "quality", "gguf"])
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shard-mb", type=int, default=500)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path, help="calibration text")
    parser.add_argument("--eval-text", type=Path, help="held-out text")
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3, 2])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--peers", nargs="*", default=["convert", "gptq", "awq", "dynamic_quant", "llama.cpp"],
                        choices=["convert", "gptq", "awq", "dynamic_quant", "dwq", "llama.cpp"])  # fmt: skip
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the held-out text")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        write_source(options.make, options.preset, options.shard_mb * 1_000_000)
        return
    with tempfile.TemporaryDirectory() as folder:
        {"speed": speed, "quality": quality, "gguf": gguf}[options.part](options, Path(folder))


def speed(options: argparse.Namespace, folder: Path) -> None:
    source = folder / "source"
    # In its own process: the peak memory of a child includes that of its parent.
    wanted = ["--preset", options.preset, "--shard-mb", str(options.shard_mb), "--make", str(source)]
    timed_command([sys.executable, __file__, "speed", *wanted])
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    out = folder / "out"
    commands = {
        "read": [sys.executable, "-c", READ, str(source)],
        "mlxlm: first token": [*MLXLM, "generate", str(source), "--prompt", "a", "--max-tokens", "1"],
        "mlx_lm: first token": [sys.executable, "-c", MLX_LM_FIRST_TOKEN, str(source)],
        "mlxlm: convert": [*MLXLM, "convert", str(source), "--out", str(out), "--dtype", "float16", "--no-verify"],
        "mlx_lm: convert": [*MLX_LM, "--hf-path", str(source), "--mlx-path", str(out), "--dtype", "float16"],
        "mlxlm: quantize": [*MLXLM, "quantize", str(source), "--out", str(out), "--method", "rtn", "--no-evaluate"],
        "mlx_lm: quantize": [*MLX_LM, "--hf-path", str(source), "--mlx-path", str(out), "-q", "--q-bits", "4"],
    }
    peaks: dict[str, list[int]] = {name: [] for name in commands}

    def run(name: str) -> float:
        seconds, peak, _ = timed_command(commands[name])
        shutil.rmtree(out, ignore_errors=True)
        peaks[name].append(peak)
        return seconds

    results = in_turn(options.rounds, **{name: lambda name=name: run(name) for name in commands})
    rows, result = [], {}
    for name, times in results.items():
        peak, ratio = max(peaks[name]) / 1e9, median(times) / median(results["read"])
        rows.append((name, f"{spread(times)} s, peak {peak:.2f} GB, {ratio:.2f} x read"))
        result[name] = {"seconds": round(median(times), 2), "peak_gb": round(peak, 2)}
    report(
        f"{options.preset}, {size / 1e9:.2f} GB of bfloat16 in shards of {options.shard_mb} MB",
        rows,
        {"benchmark": "convert_speed", "gigabytes": round(size / 1e9, 2), **result},
    )


READ = """
import pathlib, sys
for file in pathlib.Path(sys.argv[1]).glob("*.safetensors"):
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(1 << 23)
        while stream.readinto(buffer):
            pass
"""
MLX_LM_FIRST_TOKEN = """
import sys
import mlx.core as mx
from mlxlm.backend.blas import load_blas
load_blas()
from pathlib import Path
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
next(generate_step(mx.array([1]), model, max_tokens=1))
"""


def write_source(folder: Path, preset: str, shard_bytes: int) -> None:
    """A bfloat16 checkpoint with random weights, made one tensor at a time."""
    from mlxlm.backend.mlx import mx, tree_flatten
    from mlxlm.checkpoint import huggingface
    from mlxlm.checkpoint.lazy_tensor import LazyTensor
    from mlxlm.families import config_to_hf, load_preset
    from mlxlm.model import Decoder
    from mlxlm.tokenizer import train

    folder.mkdir()
    config = load_preset(preset)
    tensors = {}
    for i, (name, value) in enumerate(tree_flatten(Decoder(config).parameters())):

        def read(shape=value.shape, i=i) -> mx.array:
            if len(shape) == 1:
                return mx.ones(shape, mx.bfloat16)
            return (mx.random.normal(shape, key=mx.random.key(i)) * 0.02).astype(mx.bfloat16)

        tensors[name] = LazyTensor(tuple(value.shape), mx.bfloat16, "BF16", 2 * value.size, read)
    tokenizer = train(["a tokenizer of which one token is used, so that any text is enough to train it"], 270)
    huggingface.write(folder, config_to_hf(config), config, tensors, tokenizer, shard_bytes=shard_bytes)


def quality(options: argparse.Namespace, folder: Path) -> None:
    model, source = options.model or trained(folder), folder / "float16"
    timed_command([*MLXLM, "convert", str(model), "--out", str(source), "--dtype", "float16", "--no-verify"])
    held_out = ["--eval-text", str(options.eval_text)] if options.eval_text else []
    rows, result = [], {}

    def measure(name: str, out: Path, seconds: float, peak: int) -> None:
        comparison = compared(source, out, held_out, options.tokens)
        bits_each = comparison["weights"]["bits_per_weight_b"]
        change = comparison["bits_per_byte_b"] - comparison["bits_per_byte_a"]
        quality = f"KL {comparison['kl']:.5f}, top-1 {comparison['top1_agreement']:.1%}, {change:+.4f} bits per byte"
        cost = f"{seconds:.1f} s, peak {peak / 1e9:.2f} GB"
        rows.append((name, f"{bits_each:.3f} bits/weight, {quality}, {cost}"))
        result[name] = {"bits_per_weight": bits_each, "kl": comparison["kl"], "bpb": change, "seconds": seconds}
        print(*rows[-1], file=sys.stderr, flush=True)

    for bits in options.bits:
        rounded = folder / f"mlx_lm.convert-{bits}"
        for peer in ["convert", *(peer for peer in options.peers if peer not in ("convert", "llama.cpp"))]:
            out = folder / f"mlx_lm.{peer}-{bits}"
            seconds, peak = run_mlx_lm(peer, source, out, rounded, bits, options.text)
            measure(f"{bits} bits, mlx_lm.{peer}", out, seconds, peak)
        target = bits_per_weight(rounded)
        for name in options.methods:
            out = folder / f"{name}-{bits}"
            flags = [flag.format(bits=bits, bpw=target) for flag in METHODS[name]]
            calibrated = ["--calibration-text", str(options.text)] if options.text and name != "rtn" else []
            command = [*MLXLM, "quantize", str(source), "--out", str(out), *flags, *calibrated, "--no-evaluate"]
            seconds, peak, _ = timed_command(command)
            measure(f"{bits} bits, mlxlm {name}", out, seconds, peak)
    if "llama.cpp" in options.peers:
        from mlxlm.quantize import importance_weights

        wide = folder / "float16.gguf"
        timed_command([*MLXLM, "convert", str(source), "--out", str(wide), "--dtype", "F16", "--no-verify"])
        importance = by_tensor(wide, importance_weights(wide, options.text))
        for outtype in K_QUANTS:
            out = folder / f"{outtype}.gguf"
            measure(f"llama.cpp {outtype}", out, quantize_with_llama_cpp(wide, out, outtype, importance), 0)
    report(f"quantizing {model}", rows, {"benchmark": "quantize_quality", **result})


def run_mlx_lm(peer: str, source: Path, out: Path, rounded: Path, bits: int, text: Path) -> tuple[float, int]:
    """Run one of mlx_lm's commands with mlxlm's BLAS, on our text instead of the one it downloads."""
    home = out.with_name("home")
    calibration = home / ".cache/mlx-lm/calibration_v5.txt"
    if text and not calibration.exists():
        calibration.parent.mkdir(parents=True)
        shutil.copy(text, calibration)
        lines = [json.dumps({"text": part}) for part in textwrap.wrap(text.read_text(), 3000, replace_whitespace=False)]
        (home / "train.jsonl").write_text("\n".join(lines[len(lines) // 8 :]))
        (home / "valid.jsonl").write_text("\n".join(lines[: len(lines) // 8]))
    if peer == "convert":
        arguments = ["--hf-path", str(source), "--mlx-path", str(out), "-q", "--q-bits", str(bits)]
    elif peer == "dynamic_quant":
        average = str(bits + 0.5)  # the lower bits are below it, the higher ones above
        arguments = ["--low-bits", str(max(2, bits - 1)), "--high-bits", str(bits + 1), "--target-bpw", average]
    elif peer == "dwq":
        arguments = ["--quantized-model", str(rounded), "--data-path", str(home), "--max-seq-length", "257"]
        arguments += ["--num-samples", "256", "--batch-size", "4"]
    else:
        arguments = ["--bits", str(bits)]
        arguments += ["--fallback-bits", str(bits)] if peer == "gptq" else ["--embed-bits", str(bits)]
        arguments += ["--num-samples", "32"]
    if peer != "convert":
        arguments += ["--model", str(source), "--mlx-path", str(out)]
    module = "mlx_lm.convert" if peer == "convert" else f"mlx_lm.quant.{peer}"
    seconds, peak, _ = timed_command([sys.executable, "-c", RUN_MODULE, module, *arguments], HOME=str(home))
    return seconds, peak


RUN_MODULE = """
import runpy, sys
import mlxlm
from mlxlm.backend.blas import load_blas
load_blas()
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def gguf(options: argparse.Namespace, folder: Path) -> None:
    from mlxlm.convert import convert
    from mlxlm.quantize import importance_weights

    model, source = options.model or trained(folder), folder / "float16.gguf"
    convert(model, source, outtype="F16", verify_output=False)
    importance = importance_weights(source, options.text)
    theirs_given = by_tensor(source, importance)
    held_out = ["--eval-text", str(options.eval_text)] if options.eval_text else []
    rows, result = [], {}
    for outtype in ("Q4_K_M", "Q3_K_M", "Q2_K"):
        for label, given, of_llama_cpp in (("", None, {}), (" with importance weights", importance, theirs_given)):
            name = f"{outtype}{label}"
            ours, theirs = folder / f"{name}.gguf", folder / "llama.cpp.gguf"
            written = convert(source, ours, outtype=outtype, importance=given, verify_output=False)
            seconds = quantize_with_llama_cpp(source, theirs, outtype, of_llama_cpp)
            comparison = compared(source, ours, held_out, options.tokens)
            equal, count = equal_tensors(ours, theirs)
            change = comparison["bits_per_byte_b"] - comparison["bits_per_byte_a"]
            rows.append(
                (
                    name,
                    f"{written.bytes:,} bytes, KL {comparison['kl']:.5f}, top-1 {comparison['top1_agreement']:.1%}, "
                    f"{change:+.4f} bits per byte, {written.seconds:.1f} s; llama.cpp {theirs.stat().st_size:,} bytes, "
                    f"{seconds:.1f} s, {equal} of {count} tensors equal",
                )
            )
            result[name] = {"bytes": written.bytes, "kl": comparison["kl"], "bpb": change, "equal": equal == count}
    report(f"GGUF files of {model}", rows, {"benchmark": "quantize_gguf", **result})


def by_tensor(source: Path, importance: dict[str, Any]) -> dict[str, Any]:
    """Importance weights by the names of a GGUF file."""
    from mlxlm.checkpoint.gguf.writer import architecture_for
    from mlxlm.checkpoint.open import open_checkpoint

    config = open_checkpoint(source).config
    modules = {f"{m.name}.weight": m.modules[0] for m in architecture_for(config).weight_mappings(config)}
    return {name: importance[module] for name, module in modules.items() if module in importance}


def quantize_with_llama_cpp(source: Path, out: Path, outtype: str, importance: dict[str, Any]) -> float:
    """Quantize a file with llama.cpp and the importance weights of its tensors; returns seconds."""
    import ctypes

    import llama_cpp as cpp
    from gguf import LlamaFileType

    silent = cpp.llama_log_callback(lambda level, text, data: None)
    cpp.llama_log_set(silent, None)
    params = cpp.llama_model_quantize_default_params()
    params.ftype = LlamaFileType[f"MOSTLY_{outtype}"].value
    pointer = ctypes.POINTER(ctypes.c_float)
    entries = [(n.encode(), values.ctypes.data_as(pointer), values.size) for n, values in importance.items()]
    params.imatrix = (cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries) if entries else None
    started = time.monotonic()
    failed = cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    seconds = time.monotonic() - started
    cpp.llama_log_set(cpp.llama_log_callback(), None)  # before `silent` is freed
    if failed:
        raise SystemExit(f"llama.cpp can't write {outtype}")
    return seconds


def equal_tensors(a: Path, b: Path) -> tuple[int, int]:
    """The number of tensors with the same type and bytes in two GGUF files, and of all tensors."""
    from gguf import GGUFReader

    ours, theirs = ({tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (a, b))
    equal = [
        name
        for name, tensor in ours.items()
        if tensor.tensor_type == theirs[name].tensor_type and (tensor.data == theirs[name].data).all()
    ]
    return len(equal), len(ours)


METHODS = {
    "rtn": ["--method", "rtn", "--bits", "{bits}"],
    "awq": ["--method", "awq", "--bits", "{bits}"],
    "gptq": ["--bits", "{bits}"],
    "bits chosen": ["--target-bpw", "{bpw}"],
    "bits chosen, groups of 64": ["--target-bpw", "{bpw}", "--group-size", "64"],
    "bits chosen, recovered": ["--target-bpw", "{bpw}", "--recover"],
}
K_QUANTS = ("Q2_K", "IQ3_XXS", "Q3_K_M", "IQ4_XS", "Q4_K_M")


def trained(folder: Path) -> Path:
    """Train a small model, without the network."""
    command = [*MLXLM, "quickstart", "--minutes", "2", "--no-chat", "--out", str(folder / "run")]
    timed_command(command)
    return folder / "run"


def bits_per_weight(folder: Path) -> float:
    """Of the model in a folder, by `mlxlm inspect`."""
    _, _, out = timed_command([*MLXLM, "inspect", str(folder), "--json"])
    return json.loads(out)["bits_per_weight"]


def compared(source: Path, out: Path, held_out: list[str], tokens: int) -> dict[str, float]:
    """The result of `mlxlm compare`."""
    command = [*MLXLM, "compare", str(source), str(out), *held_out, "--tokens", str(tokens), "--json"]
    return json.loads(timed_command(command)[2])


if __name__ == "__main__":
    main()
