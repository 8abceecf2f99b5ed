"""Train a convolutional digit classifier on GPUs, one a rank, with gradients averaged by gccomm.

    gccomm run -n 2 examples/train_cupy.py
    mpiexec -n 4 python examples/train_cupy.py --codec uniform:wire_bits=4
    python examples/train_cupy.py                # alone

Two convolutions and a dense layer on scikit-learn's digits, in CuPy with gradients by hand; the options and
the output are those of train_digits.py beside it. Weights, gradients and what gccomm keeps stay on the device
of the rank. Where a rank has no GPU, all ranks run the same lines in NumPy, and a line on stderr says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import train_digits  # found by the line above

import gccomm

Array = Any  # of NumPy or CuPy
Weights = dict[str, Array]

SIDE = 8  # of an image
FIRST, SECOND = 16, 32  # channels after each convolution; the second one halves the image's sides
FLAT = SECOND * (SIDE // 2) ** 2


def initial_weights(seed: int) -> Weights:
    """Return kernels, biases and the dense layer's matrix, in NumPy."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(np.sqrt(2 / rows))

    return {
        "k1": matrix(9, FIRST),
        "b1": np.zeros(FIRST, np.float32),
        "k2": matrix(9 * FIRST, SECOND),
        "b2": np.zeros(SECOND, np.float32),
        "w": matrix(FLAT, 10),
        "b": np.zeros(10, np.float32),
    }


def patches(xp: Any, x: Array, stride: int) -> Array:
    """Return what lies around each place: (n, side, side, c) -> (n, side / stride, side / stride, 9 c)."""
    side = x.shape[1]
    framed = xp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifts = [(i, j) for i in range(3) for j in range(3)]
    return xp.concatenate(
        [framed[:, i : i + side : stride, j : j + side : stride] for i, j in shifts], axis=3
    )


def unpatched(xp: Any, back: Array, side: int, stride: int) -> Array:
    """Return the gradient of the input of :func:`patches` from that of its output."""
    channels = back.shape[3] // 9
    framed = xp.zeros((len(back), side + 2, side + 2, channels), back.dtype)
    for place in range(9):
        i, j = divmod(place, 3)
        part = back[..., place * channels : (place + 1) * channels]
        framed[:, i : i + side : stride, j : j + side : stride] += part
    return framed[:, 1:-1, 1:-1]


class ConvNet:
    """The network in an array library.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp

    def forward(self, weights: Weights, x: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return logits, and what the gradients need."""
        xp = self.xp
        around1 = patches(xp, x.reshape(-1, SIDE, SIDE, 1), 1)
        hidden1 = xp.maximum(around1 @ weights["k1"] + weights["b1"], 0)
        around2 = patches(xp, hidden1, 2)
        hidden2 = xp.maximum(around2 @ weights["k2"] + weights["b2"], 0)
        flat = hidden2.reshape(-1, FLAT)
        return flat @ weights["w"] + weights["b"], (around1, hidden1, around2, hidden2, flat)

    def gradients(self, weights: Weights, x: Array, y: Array) -> tuple[float, Weights]:
        """Return the mean cross-entropy of a batch and its gradient, with weight decay."""
        xp = self.xp
        logits, (around1, hidden1, around2, hidden2, flat) = self.forward(weights, x)
        logits = logits - logits.max(axis=1, keepdims=True)
        probabilities = xp.exp(logits)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        wanted = xp.eye(10, dtype=probabilities.dtype)[y]
        loss = -(wanted * xp.log(probabilities + 1e-30)).sum() / len(y)
        error = (probabilities - wanted) / len(y)
        back2 = (error @ weights["w"].T).reshape(hidden2.shape) * (hidden2 > 0)
        back1 = unpatched(xp, back2 @ weights["k2"].T, SIDE, 2) * (hidden1 > 0)
        found = {
            "k1": _rows(around1).T @ _rows(back1),
            "b1": _rows(back1).sum(axis=0),
            "k2": _rows(around2).T @ _rows(back2),
            "b2": _rows(back2).sum(axis=0),
            "w": flat.T @ error,
            "b": error.sum(axis=0),
        }
        for key in ("k1", "k2", "w"):
            found[key] += train_digits.DECAY * weights[key]
        return float(loss), found

    def accuracy(self, weights: Weights, x: Array, y: Array) -> float:
        return float((self.forward(weights, x)[0].argmax(axis=1) == y).mean())


def _rows(x: Array) -> Array:
    """Return an array of channels as a matrix."""
    return x.reshape(-1, x.shape[-1])


def array_library(comm: gccomm.Communicator) -> Any:
    """Return CuPy, on the device of this local rank, if all ranks have one, else NumPy; collective."""
    cupy, why = device_library(comm.local_rank)
    without = int(comm.allreduce(np.int64(cupy is None)))
    if not without:
        return cupy
    if comm.rank == 0:
        who = "there is no GPU" if comm.size == 1 else f"{without} of {comm.size} ranks have no GPU"
        print(f"train_cupy: {who}{f' ({why})' if why else ''}; training in NumPy", file=sys.stderr)
    return np


def device_library(local_rank: int) -> tuple[Any, str]:
    """Return CuPy, the device of a local rank made current; or None, and why there is none."""
    try:
        import cupy
    except ImportError as error:
        return None, f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return None, str(error)
    if count == 0:
        return None, "CuPy sees no device"
    cupy.cuda.Device(local_rank % count).use()
    return cupy, ""


def main(argv: list[str] | None = None) -> int:
    options = train_digits.parse(argv, "a convolutional digit classifier on GPUs")
    comm = gccomm.init()
    xp = array_library(comm)
    net = ConvNet(xp)
    model = train_digits.Model(initial_weights, net.gradients, net.accuracy, xp.asarray)
    return train_digits.run(options, comm, model)


if __name__ == "__main__":
    sys.exit(main())
