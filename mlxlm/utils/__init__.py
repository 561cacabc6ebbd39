"""Errors, atomic files, bounded reads, JSON, number formatting: nothing here knows about language models."""
