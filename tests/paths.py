"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real models and texts, beside a checkout; tests that need them skip without
