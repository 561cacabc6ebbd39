"""Requests and results as lines of JSON."""
