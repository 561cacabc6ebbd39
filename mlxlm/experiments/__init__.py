"""Experiments of many training runs: scaling laws, sweeps and architecture comparisons."""
