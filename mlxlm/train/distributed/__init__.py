"""Data-parallel training in several processes, on one machine or many."""
