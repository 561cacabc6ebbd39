"""Helpers without any knowledge of language models: errors, files, bounded reads, number formatting."""
