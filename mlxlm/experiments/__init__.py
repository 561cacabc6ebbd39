"""Experiments of many training runs: scaling laws and architecture comparisons."""
