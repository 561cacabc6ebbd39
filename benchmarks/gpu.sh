#!/usr/bin/env bash
# Tests, checks and benchmarks of mlxlm on a machine with an NVIDIA GPU, through MLX's CUDA backend.
#
#     benchmarks/gpu.sh [--wheels FOLDER | --python PYTHON] [--extra cuda12] [--tiny] OUT
#
# Makes a virtual environment in the new folder OUT and collects everything there: for each part its output, its messages
# and its time, and a summary. A part that fails doesn't stop the others; the exit code is then 1.
#
#     --wheels FOLDER   install from this folder, without a network. On a machine with a network and the same system:
#                       pip download --dest FOLDER '.[cuda12,dev]' torch transformers hatchling
#     --python PYTHON   use this interpreter, which has mlxlm and the rest, instead of a new virtual environment
#     --extra NAME      MLX's backend: cuda12 (the default), cuda13 or cpu
#     --tiny            a few tests and tiny models, in minutes, to see that the script works
set -uo pipefail
wheels='' python='' extra=cuda12 tiny='' out=''
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$(realpath "$2"); shift ;;
        --python) python=$2; shift ;;
        --extra) extra=$2; shift ;;
        --tiny) tiny=1 ;;
        -*) echo "unknown option $1" >&2; exit 2 ;;
        *) out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || { echo "usage: benchmarks/gpu.sh [--wheels FOLDER | --python PYTHON] [--extra cuda12] [--tiny] OUT" >&2; exit 2; }
mkdir "$out" || exit 2
out=$(realpath "$out")
cd "$(dirname "$0")/.." || exit 2
failed=''

part() {  # NAME COMMAND...: run a part; its output goes to OUT/NAME.out, its messages to OUT/NAME.err
    local name=$1 start=$SECONDS result=ok
    shift
    echo "$name ..." >&2
    "$@" >"$out/$name.out" 2>"$out/$name.err" || { result="failed with $?"; failed="$failed $name"; }
    echo "$name: $result, $((SECONDS - start)) s" | tee -a "$out/summary.txt" >&2
}

install() {
    python3 -m venv "$out/venv" && . "$out/venv/bin/activate" || return
    local source=()
    [ -z "$wheels" ] || source=(--no-index --find-links "$wheels")
    pip install "${source[@]}" ".[$extra,dev]" || return
    pip install "${source[@]}" torch transformers || echo "without PyTorch: nothing to compare with" >&2
}

if [ -z "$python" ]; then
    part install install
    python=$out/venv/bin/python
else
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi
! command -v nvidia-smi >/dev/null || part nvidia-smi nvidia-smi -q -d MEMORY,CLOCK,POWER,ECC

if [ -n "$tiny" ]; then
    part tests "$python" -m pytest tests/kernels/test_blockwise.py tests/test_benchmarks.py
    train=(--models 1M --rounds 1 --steps 1 --batch-size 2 --max-seq-length 64)
    decode=(--sizes 1m --contexts 0 --rounds 1 --prompt 16 --tokens 8)
else
    part tests "$python" -m pytest -n 4
    train=(--models 110m,1b --rounds 3 --steps 5 --batch-size 8 --max-seq-length 2048)
    decode=(--sizes 110m 1b --contexts 0 8192 --rounds 3 --prompt 512 --short 512 --tokens 256)
fi
part doctor "$python" -m mlxlm.cli.main doctor --full --out "$out/doctor.json"
part train "$python" benchmarks/train_throughput.py "${train[@]}" --ways mlxlm,plain_mlx,pytorch_mixed
part decode "$python" benchmarks/generation_speed.py "${decode[@]}" --peers mlx_lm pytorch

for name in train decode; do [ ! -s "$out/$name.err" ] || tail -n 30 "$out/$name.err" >&2; done
[ -z "$failed" ] || { echo "failed:$failed" | tee -a "$out/summary.txt" >&2; exit 1; }
