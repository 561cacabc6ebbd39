"""Scaling laws: how the loss falls with parameters and tokens, fitted to measured runs, and what follows from it.

Plain numbers in and out; scipy is imported where something is fitted. The runs are those of `mlxlm.train.grid`.
"""
