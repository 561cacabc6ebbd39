"""MLX and its BLAS, facts about the machine, memory bandwidth, and the files of MLX's CPU compiler."""
