"""mlxlm: language models on Apple silicon, with MLX."""
