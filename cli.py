"""Runs the command line from a checkout: `python cli.py chat MODEL` is `mlxlm chat MODEL`."""

from mlxlm.cli.main import main

if __name__ == "__main__":
    main()
