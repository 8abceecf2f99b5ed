"""Train the digits example over seeds, ranks and codecs, and compare their test accuracies.

    python benchmarks/digits.py --json FILE

Every run is a job of its own, started with `gccomm run`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_digits.py"


def train(codec: str, ranks: int, seed: int) -> dict[str, Any]:
    """Return the last line of one training job as a dict."""
    command = [sys.executable, "-c", "import gccomm_launch.cli as c, sys; sys.exit(c.main())", "run"]
    command += ["-n", str(ranks), str(EXAMPLE), "--codec", codec, "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if len(set(result["digests"])) != 1:
        sys.exit(f"ranks hold different weights: {result['digests']}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Test accuracy of the digits example by codec.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--codecs", nargs="+", default=["raw", "bf16", "uniform", "uniform:wire_bits=4"])
    parser.add_argument("--json", metavar="FILE", help="also write everything to FILE")
    options = parser.parse_args()
    rows = []
    print(f"{'ranks':>5}  {'codec':<22} {'accuracy':>9} {'lowest':>8} {'ratio':>6}")
    for ranks in options.ranks:
        for codec in options.codecs:
            runs = [train(codec, ranks, seed) for seed in range(options.seeds)]
            accuracies = [run["accuracy"] for run in runs]
            ratio = mean(run["float32_bytes"] / run["wire_bytes"] for run in runs)
            rows.append({"ranks": ranks, "codec": codec, "accuracies": accuracies, "ratio": ratio})
            print(f"{ranks:>5}  {codec:<22} {mean(accuracies):>8.2%} {min(accuracies):>7.2%} {ratio:>6.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"seeds": options.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
