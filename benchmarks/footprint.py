"""Wall time and peak memory of common commands: the help, a first token, the quickstart.

python benchmarks/footprint.py [--rounds 5] [--quickstart]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from common import median, report, timed_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quickstart", action="store_true", help="also the quickstart, about three minutes")
    options = parser.parse_args()
    bin_folder = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        # In its own process: on Linux the peak memory of a child includes that of its parent.
        maker = Path(__file__).with_name("generation_speed.py")
        subprocess.run([sys.executable, maker, "--make", folder], check=True)
        small = str(Path(folder, "4-bit"))
        prompt = ["--prompt", "hello", "--max-tokens", "1"]
        commands = {
            "mlxlm --help": [str(bin_folder / "mlxlm"), "--help"],
            "mlxlm generate, first token": [str(bin_folder / "mlxlm"), "generate", small, *prompt],
            "mlx_lm.generate, first token": [str(bin_folder / "mlx_lm.generate"), "--model", small, *prompt],
        }
        results = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                results[name].append(timed_command(command)[:2])
        if options.quickstart:
            command = [str(bin_folder / "mlxlm"), "quickstart", "--out", str(Path(folder, "run"))]
            results["mlxlm quickstart"] = [timed_command(command)[:2]]
    rows, result = [], {}
    for name, runs in results.items():
        seconds, memory = median([s for s, _ in runs]), median([m for _, m in runs])
        rows.append((name, f"{seconds:.2f} s, {memory / 1e6:.0f} MB"))
        result[name] = {"seconds": round(seconds, 3), "bytes": int(memory)}
    report("time and peak memory", rows, {"benchmark": "footprint", "commands": result})


if __name__ == "__main__":
    main()
