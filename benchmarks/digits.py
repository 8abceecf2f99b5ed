"""Train the digits example over codecs and seeds, and compare test accuracies with uncompressed training.

    python benchmarks/digits.py --json benchmarks/results/digits.json
    python benchmarks/digits.py --record digits.npz     # for `gccomm bench --accuracy --gradients digits.npz`

A training runs in one process, each rank a thread with the example's own code and gccomm's local back end:
the results of lane codecs are bit for bit those of ranks under MPI. Trainings run side by side, one a core.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from gccomm_launch.bench import write_json
from gccomm_launch.machine import machine

import gccomm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import train_digits  # noqa: E402  (found by the line above)

# Each codec as its page recommends it; error feedback is the default: on for biased codecs.
SETTINGS = {
    "raw": "raw",
    "bf16": "bf16",
    "fp16": "fp16",
    "uniform": "uniform:wire_bits=8",
    "uniform 4": "uniform:wire_bits=4",
    "rotated": "rotated:wire_bits=8",
    "rotated 4": "rotated:wire_bits=4",
    "rotated 4 clipped": "rotated:wire_bits=4,headroom=clipped",
    "rehop": "rehop:wire_bits=5",
    "rehop 4": "rehop:wire_bits=4",
    "qsgd-mn": "qsgd-mn:wire_bits=8",
    "qsgd-mn-ts": "qsgd-mn-ts:wire_bits=8",
    "grandk-mn": "grandk-mn:wire_bits=8",
    "grandk-mn-ts": "grandk-mn-ts:wire_bits=8",
    "global-qsgd": "global-qsgd:wire_bits=8",
    "intsgd": "intsgd:wire_bits=8",
    "thc": "thc:wire_bits=8",
    "topkc": "topkc",
    "powersgd": "powersgd",
}


@dataclass
class Row:
    """A codec's trainings; `accuracies` and `points` (to raw, in percentage points) by seed."""

    name: str
    codec: str
    config: dict[str, Any]
    ranks: int
    accuracies: list[float]
    points: list[float]
    mean_accuracy: float
    mean_points: float
    error_of_mean_points: float
    ratio: float
    seconds: float


def train(codec: str, ranks: int, seed: int, epochs: int) -> tuple[float, float, float]:
    """Return test accuracy, float32 bytes over wire bytes, and seconds of one training."""
    options = train_digits.parse(["--codec", codec, "--seed", str(seed), "--epochs", str(epochs)])

    def rank(comm: gccomm.Communicator) -> tuple[float, float, list[str]]:
        trainer = train_digits.Trainer(options, comm)
        for epoch in range(epochs):
            trainer.epoch(epoch)
        digests = train_digits.digests(trainer.weights, comm)
        return trainer.accuracy(), trainer.float32_bytes / trainer.wire_bytes, digests

    start = time.perf_counter()
    accuracy, ratio, digests = gccomm.testing.run(rank, ranks)[0]
    if len(set(digests)) != 1:
        message = f"{codec}, seed {seed}: the ranks' weights differ: {digests}"
        raise RuntimeError(message)
    return accuracy, ratio, time.perf_counter() - start


def recorded(ranks: int, steps: int, seed: int = 0, before: int = 30) -> Iterator[list[dict[str, Any]]]:
    """Train without compression and yield, for each step after the first ``before``, each rank's gradients.

    Batches hold as many samples as those of 4 ranks in the example, whatever ``ranks``; so fewer ranks may
    take part of a recording of many. Each is drawn anew from the rank's shard.
    """
    x, y, _, _ = train_digits.load()
    weights = train_digits.initial_weights(seed)
    momentum = {key: np.zeros_like(value) for key, value in weights.items()}
    batch, rate = 12, 0.05
    share = train_digits.TRAIN // ranks
    rngs = [np.random.default_rng((seed, rank)) for rank in range(ranks)]
    for step in range(before + steps):
        trees = []
        for rank, rng in enumerate(rngs):
            chosen = rank * share + rng.choice(share, batch, replace=False)
            trees.append(train_digits.gradients(weights, x[chosen], y[chosen])[1])
        if step >= before:
            yield trees
        for key in weights:
            momentum[key] = train_digits.MOMENTUM * momentum[key] + mean_of([tree[key] for tree in trees])
            weights[key] = weights[key] - np.float32(rate) * momentum[key]


def mean_of(arrays: Sequence[Any]) -> Any:
    return np.mean(arrays, axis=0, dtype=np.float32)


def record(path: Path, ranks: int, steps: int, seed: int) -> None:
    """Write what :func:`recorded` yields: one array (steps, ranks, *shape) a parameter."""
    found = list(recorded(ranks, steps, seed))
    arrays: dict[str, Any] = {
        key: np.array([[tree[key] for tree in trees] for trees in found]) for key in found[0][0]
    }
    np.savez(path, **arrays)
    print(f"{path}: {steps} steps of {ranks} ranks, {', '.join(arrays)}")


def available(names: Sequence[str]) -> dict[str, str]:
    """Return the settings of these codecs, less those that are not installed, which it names on stderr."""
    found = {}
    for name in names:
        try:
            gccomm.get_codec(SETTINGS.get(name, name))
        except gccomm.UnknownCodecError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            found[name] = SETTINGS.get(name, name)
    return found


def summarise(name: str, codec: str, ranks: int, runs: Sequence[Any], raw: Sequence[float]) -> Row:
    accuracies = [accuracy for accuracy, _, _ in runs]
    points = [100 * (mine - theirs) for mine, theirs in zip(accuracies, raw, strict=True)]
    spread = stdev(points) / len(points) ** 0.5 if len(points) > 1 else 0.0
    config = gccomm.get_codec(codec).config()
    ratio, seconds = mean(run[1] for run in runs), sum(run[2] for run in runs)
    return Row(
        name, codec, config, ranks, accuracies, points, mean(accuracies), mean(points), spread, ratio, seconds
    )


def compare(options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Train all, print each codec's line when its trainings are done; return rows, and who refused why."""
    codecs = available(list(dict.fromkeys(["raw", *options.codecs])))
    print(f"{'ranks':>5}  {'codec':<32} {'accuracy':>9} {'points to raw':>16} {'ratio':>6} {'seconds':>8}")
    rows, refused = [], {}
    seeds = range(options.seeds)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        pending = {
            (ranks, name): [pool.submit(train, codec, ranks, seed, options.epochs) for seed in seeds]
            for ranks in options.ranks
            for name, codec in codecs.items()
        }
        for (ranks, name), futures in pending.items():
            try:
                runs = [future.result() for future in futures]
            except gccomm.NegotiationError as error:
                refused[f"{name}, {ranks} ranks"] = str(error)
                print(f"{ranks:>5}  {codecs[name]:<32} refused: {error}", flush=True)
                continue
            raw = [future.result()[0] for future in pending[ranks, "raw"]]
            rows.append(summarise(name, codecs[name], ranks, runs, raw))
            print(line(rows[-1]), flush=True)
    return rows, refused


def line(row: Row) -> str:
    points = f"{row.mean_points:+.2f} +- {row.error_of_mean_points:.2f}"
    return (
        f"{row.ranks:>5}  {row.codec:<32} {row.mean_accuracy:>8.2%} {points:>16} {row.ratio:>6.2f} "
        f"{row.seconds:>8.1f}"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test accuracy of the digits example by codec.")
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", help="(default 4; 64 with --record)")
    add("--seeds", type=int, default=10, help="trainings of each codec (default 10)")
    add("--epochs", type=int, default=30, help="of a training (default 30)")
    add("--codecs", nargs="+", default=list(SETTINGS), help="names of settings, or ids with options")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="trainings at a time (default: cores)")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    add("--record", type=Path, metavar="FILE", help="write gradients to an .npz file and train nothing else")
    add("--steps", type=int, default=6, help="to record (default 6)")
    options = parser.parse_args(argv)
    if min(options.seeds, options.epochs, options.jobs, options.steps, *(options.ranks or [1])) < 1:
        parser.error("--ranks, --seeds, --epochs, --jobs and --steps must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.record is not None:
        record(options.record, (options.ranks or [64])[0], options.steps, 0)
        return
    options.ranks = options.ranks or [4]
    start = time.perf_counter()
    rows, refused = compare(options)
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s")
    if options.json is not None:
        report = {"machine": machine(), "seeds": options.seeds, "epochs": options.epochs, "seconds": seconds}
        write_json(options.json, {**report, "refused": refused, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
