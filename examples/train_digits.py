"""Train a digit classifier on several ranks, with gradients averaged by gccomm in 8 bits a coordinate.

    gccomm run -n 2 examples/train_digits.py
    mpiexec -n 4 python examples/train_digits.py --codec uniform:wire_bits=4
    python examples/train_digits.py                # alone

A network of 64, 128 and 10 units on scikit-learn's digits, in NumPy with gradients by hand. Each rank holds
a disjoint shard of the training set. Every rank applies the same averaged gradients, bit for bit, so the
weights stay equal without ever being sent again; the program ends with status 1 if they do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

import gccomm

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Weights = dict[str, Floats]

TRAIN = 1440  # of 1797 samples; a multiple of 2, 3, 4, 5, 6 and 8
HIDDEN = 128
MOMENTUM = 0.9
DECAY = 1e-3  # of the weight matrices


def load() -> tuple[Floats, Labels, Floats, Labels]:
    """Return centred training inputs and labels, then those of the test; the same split in every run."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(2024).permutation(len(x))
    x, y = x[order] / 8, y[order].astype(np.int64)
    x = (x - x[:TRAIN].mean(axis=0)).astype(np.float32)
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def initial_weights(seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        "w1": rng.standard_normal((64, HIDDEN), np.float32) * np.float32(np.sqrt(2 / 64)),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": rng.standard_normal((HIDDEN, 10), np.float32) * np.float32(np.sqrt(2 / HIDDEN)),
        "b2": np.zeros(10, np.float32),
    }


def gradients(weights: Weights, x: Floats, y: Labels) -> tuple[float, Weights]:
    """Return the mean cross-entropy of a batch and its gradient, with weight decay."""
    hidden = np.maximum(x @ weights["w1"] + weights["b1"], 0)
    logits = hidden @ weights["w2"] + weights["b2"]
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(probabilities[rows, y] + 1e-30).mean()
    error = probabilities
    error[rows, y] -= 1
    error /= len(y)
    back = (error @ weights["w2"].T) * (hidden > 0)
    return float(loss), {
        "w1": x.T @ back + DECAY * weights["w1"],
        "b1": back.sum(axis=0),
        "w2": hidden.T @ error + DECAY * weights["w2"],
        "b2": error.sum(axis=0),
    }


def accuracy(weights: Weights, x: Floats, y: Labels) -> float:
    hidden = np.maximum(x @ weights["w1"] + weights["b1"], 0)
    return float(((hidden @ weights["w2"] + weights["b2"]).argmax(axis=1) == y).mean())


def batches(count: int, batch: int, seed: tuple[int, ...]) -> Iterator[Labels]:
    """Yield indices of one epoch's batches of a shard; an incomplete last batch is left out."""
    order = np.random.default_rng(seed).permutation(count)
    for low in range(0, count - batch + 1, batch):
        yield order[low : low + batch]


def digests(weights: Weights, comm: gccomm.Communicator) -> list[str]:
    """Return the SHA-256 of each rank's weights, on every rank."""
    digest = hashlib.sha256(b"".join(weights[key].tobytes() for key in sorted(weights))).digest()
    table = np.zeros((comm.size, len(digest)), np.uint8)
    table[comm.rank] = np.frombuffer(digest, np.uint8)
    return [bytes(row).hex() for row in comm.allreduce(table)]  # integers are summed exactly


class Model(NamedTuple):
    """What is trained: three functions, and where arrays are to be."""

    initial_weights: Callable[[int], Weights] = initial_weights
    gradients: Callable[[Weights, Floats, Labels], tuple[float, Weights]] = gradients
    accuracy: Callable[[Weights, Floats, Labels], float] = accuracy
    place: Callable[[Any], Any] = np.asarray


class Trainer:
    """Weights, momentum and shard of one rank."""

    def __init__(
        self, options: argparse.Namespace, comm: gccomm.Communicator, model: Model | None = None
    ) -> None:
        self.comm, self.seed, self.lr, self.epochs = comm, options.seed, options.lr, options.epochs
        self.model = model or Model()
        place = self.model.place
        x, y, self.test_x, self.test_y = map(place, load())
        share = TRAIN // comm.size  # equal on all ranks, so that all make as many steps
        mine = slice(comm.rank * share, (comm.rank + 1) * share)
        self.x, self.y = x[mine], y[mine]
        self.batch = options.batch // comm.size
        first = comm.broadcast(self.model.initial_weights(options.seed))
        self.weights: Weights = {key: place(value) for key, value in first.items()}
        self.momentum = {key: np.zeros_like(value) for key, value in self.weights.items()}
        self.reducer = gccomm.Reducer(options.codec, comm=comm, op="mean", seed=options.seed)
        self.wire_bytes = self.float32_bytes = 0

    def epoch(self, number: int) -> float:
        """Go through the shard once; return the mean loss over steps and ranks."""
        rate = self.lr * (1 - number / self.epochs)
        losses = []
        for numbers in batches(len(self.x), self.batch, (self.seed, number, self.comm.rank)):
            chosen = self.model.place(numbers)
            loss, mine = self.model.gradients(self.weights, self.x[chosen], self.y[chosen])
            mean = self.reducer(mine)
            for key in self.weights:
                self.momentum[key] = MOMENTUM * self.momentum[key] + mean[key]
                self.weights[key] -= rate * self.momentum[key]
            losses.append(loss)
            self.wire_bytes += self.reducer.stats.wire_bytes
            self.float32_bytes += self.reducer.stats.float32_bytes
        return float(self.comm.allreduce(np.float64(np.mean(losses)), op="mean"))

    def accuracy(self) -> float:
        return self.model.accuracy(self.weights, self.test_x, self.test_y)


def parse(argv: list[str] | None = None, what: str = "a digit classifier") -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Train {what} on several ranks with compressed gradients.",
        epilog="Start it with `gccomm run -n 2` or mpiexec, or alone.",
    )
    parser.add_argument("--codec", default="rotated", help="of the gradients (default rotated, 8 bits)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, shuffling and rounding (default 0)")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training set (default 30)")
    parser.add_argument("--batch", type=int, default=48, help="samples a step, over all ranks (default 48)")
    parser.add_argument(
        "--lr", type=float, default=0.05, help="learning rate at first, falling to 0 (default 0.05)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args(argv)
    if options.seed < 0 or options.epochs < 1:
        parser.error("--seed must be at least 0 and --epochs at least 1")
    if not 0 < options.lr < float("inf"):
        parser.error(f"--lr must be a positive, finite number, got {options.lr}")
    try:
        gccomm.get_codec(options.codec)
    except (TypeError, ValueError) as error:
        parser.error(f"--codec: {error}")
    return options


def train(trainer: Trainer) -> float:
    """Train, and report on rank 0; return the last loss."""
    loss = float("nan")
    for epoch in range(trainer.epochs):
        wire, whole = trainer.wire_bytes, trainer.float32_bytes
        loss = trainer.epoch(epoch)
        wire, whole = trainer.wire_bytes - wire, trainer.float32_bytes - whole
        if trainer.comm.rank == 0:
            print(
                f"epoch {epoch + 1:2}: loss {loss:.4f}, test accuracy {trainer.accuracy():.2%}, "
                f"{wire} bytes on the wire a rank, {whole / wire:.2f} times less than float32"
            )
    return loss


def report(trainer: Trainer, options: argparse.Namespace, loss: float) -> int:
    """Compare the ranks' weights and print the result on rank 0; return the exit status."""
    found = digests(trainer.weights, trainer.comm)
    if trainer.comm.rank == 0:
        for rank, digest in enumerate(found):
            print(f"rank {rank}: weights {digest}")
        result = {
            "ranks": trainer.comm.size,
            "codec": options.codec,
            "seed": options.seed,
            "epochs": options.epochs,
            "accuracy": trainer.accuracy(),
            "loss": loss,
            "wire_bytes": trainer.wire_bytes,
            "float32_bytes": trainer.float32_bytes,
            "digests": found,
        }
        if options.json:
            print(json.dumps(result))
    if len(set(found)) == 1:
        return 0
    if trainer.comm.rank == 0:
        print("the ranks' weights differ", file=sys.stderr)
    return 1


def run(options: argparse.Namespace, comm: gccomm.Communicator, model: Model | None = None) -> int:
    """Train and report; return the exit status."""
    if not comm.size <= options.batch <= TRAIN:
        if comm.rank == 0:
            print(f"--batch must be {comm.size} (ranks) to {TRAIN} (samples)", file=sys.stderr)
        return 2
    trainer = Trainer(options, comm, model)
    return report(trainer, options, train(trainer))


def main(argv: list[str] | None = None) -> int:
    return run(parse(argv), gccomm.init())


if __name__ == "__main__":
    sys.exit(main())
