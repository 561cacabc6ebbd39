"""Sizes with which all checks take seconds."""

from dataclasses import replace

from mlxlm.backend.mlx import ON_CPU
from mlxlm.doctor.sizes import CPU, GPU, KernelModel

DTYPE = "float32" if ON_CPU else "bfloat16"
TINY = replace(
    CPU if ON_CPU else GPU,
    kernel_models=(KernelModel("0.3m", DTYPE),),
    benchmark_models=(KernelModel("0.3m", DTYPE),),
    repeats=1,
    ragged=True,
    training=("0.3m", {"vocab_size": 300, "num_hidden_layers": 1}),
    settings={"steps": 4, "batch_size": 2, "max_seq_length": 32},
    stop_after=2,
    decoding=("0.3m", {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}),
    prompt=24,
    tokens=4,
    questions=1,
    matrix=256,
)
