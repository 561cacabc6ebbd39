"""The machine: MLX and its BLAS, platform and memory facts, memory bandwidth, CPU cores, compiled CPU kernels."""
