"""Runs the command line from a checkout: `python cli.py chat MODEL` does what `mlxlm chat MODEL` does."""

from mlxlm.cli.main import main

if __name__ == "__main__":
    main()
