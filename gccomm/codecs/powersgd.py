"""``powersgd``: low-rank approximation by one step of subspace iteration on the sum of the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.checks import integer
from gccomm.codecs.base import Codec, State
from gccomm.codecs.lowrank import gaussian, normalise, orthonormalise, product
from gccomm.codecs.whole import exponents, keep_old, lose, scaled
from gccomm.steps import Agree, Context, Steps, Words, float_sum

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.steps import Buffer

__all__ = ["PowerSGD"]

MOST_RANK = 1024


class PowerSGD(Codec):
    """Approximate the sum of the ranks' matrices M_i by a product of thin ones.

    P = orth(sum_i M_i Q), Q' = sum_i M_i^T P, the sum's approximation is P Q'^T; Q' is the next step's Q. A
    tensor is a matrix of its first axis (longer than 1) by all others. Those of one axis, and those of which
    P and Q' would not be smaller, are summed as they are. The residual is M_i - P (M_i^T P)^T, what P leaves
    of this rank's matrix; as published it is M_i - P Q'^T / n, in which differences between ranks add up.

    Parameters
    ----------
    rank : int
        Columns r of P and Q, 1 to 1024. A matrix of m by k costs (m + k) r floats.
    warm_start : bool
        Start from the last step's Q' (in a Reducer), so that steps together are a power iteration; else, and
        in the first step, from random numbers.

    Notes
    -----
    T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization" (2019).
    Sums are the back end's, in float32 (float64 for float64): the bits of results depend on its order, and
    are the same on all ranks as far as its float sums are. One word a matrix is agreed on before, its
    largest magnitude, which tells tensors that are not finite, and by what power of two to divide huge or
    tiny ones.
    """

    id: ClassVar[str] = "powersgd"
    unit: ClassVar[str] = "tensor"
    sums_as = "float32"
    rounding = "biased"
    biased = True

    def __init__(self, rank: int = 4, warm_start: bool = True) -> None:
        self.rank = integer("rank", rank, "a number of columns", 1, MOST_RANK)
        if not isinstance(warm_start, bool):
            msg = f"`warm_start` must be a bool, got {warm_start!r} of type {type(warm_start).__name__}"
            raise TypeError(msg)
        self.warm_start = self.stateful = warm_start

    def weight(self, item_bytes: int) -> int:
        """Return the words of a coordinate: 2 for float64."""
        return max(1, item_bytes // 4)

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths: floats of tensors that are summed as they are."""
        return lengths

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on magnitudes, sum M Q and the other tensors, then M^T P."""
        del ctx
        shapes = [self._matrix(x.shape(i)) for i in range(x.count)]
        tasks: list[_Task] = yield from self._agree(x, shapes, state)
        plain = [i for i, shape in enumerate(shapes) if shape is None]
        sums = yield from _first_sum(x, tasks, plain)
        bases = [orthonormalise(p, x.keys[t.i]) for t, p in zip(tasks, sums, strict=True)]
        matrices = [t.load(x) for t in tasks]
        second = _Floats(x, [t.right for t in tasks])
        for p, matrix, q in zip(bases, matrices, second.parts, strict=True):
            np.matmul(p, matrix, out=q)
        own = second.flat.copy() if x.feedback else second.flat
        if tasks:
            yield float_sum(second.flat)
        returned: list[State | None] = [None] * x.count
        mine = second.like(own)
        for t, p, q, part, matrix in zip(tasks, bases, second.parts, mine, matrices, strict=True):
            t.finish(x, p, q, part, matrix)
            returned[t.i] = {"q": normalise(q), "steps": t.steps + 1}
        return returned

    def _matrix(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Return rows, columns and rank of a tensor that is worth it."""
        while shape and shape[0] == 1:
            shape = shape[1:]
        m, k = (shape[0], int(np.prod(shape[1:], dtype=np.int64))) if shape else (0, 0)
        return (m, k, self.rank) if (m + k) * self.rank < m * k else None

    def _agree(
        self, x: Operand, shapes: Sequence[tuple[int, int, int] | None], state: Sequence[State | None]
    ) -> Steps:
        """Agree on the largest magnitude of each matrix; return those that are neither zero nor lost."""
        thin = [(i, shape) for i, shape in enumerate(shapes) if shape is not None]
        if not thin:
            return []

        def fill(out: Words) -> None:
            blocks = np.empty(x.blocks, dtype=np.uint32)
            x.maxima(blocks)
            out[:] = np.maximum.reduceat(blocks, x.bounds[:-1])[[i for i, _ in thin]]

        agreed = yield Agree(len(thin), fill)
        assert agreed is not None
        bad = x.nonfinite_scales(agreed)
        largest = x.scale_values(np.where(bad, np.uint32(0), agreed))
        tasks = []
        for (i, shape), lost, most, power in zip(thin, bad, largest, exponents(largest), strict=True):
            if lost:
                lose(x, i)
            elif most == 0:
                nothing = np.zeros(shape[0] * shape[1], dtype=np.float32)
                x.store(i, nothing)
                x.keep(i, nothing)
            else:
                tasks.append(_Task(i, *shape, power, state[i]))
        return tasks

    def next_state(self, old: State | None, parts: Sequence[Any]) -> State | None:
        """Return Q for the next step; the old one after a step that had none."""
        return old if parts[0] is None else parts[0]

    def check_state(self, state: State, dtype: str, row_shape: Sequence[int]) -> None:
        """Raise ValueError unless it holds Q of an array of this shape."""
        del dtype
        q, shape = np.asarray(state["q"]), self._matrix(tuple(row_shape))
        if (
            shape is None
            or q.dtype.kind != "f"
            or q.shape != (shape[2], shape[1])
            or not np.isfinite(q).all()
        ):
            raise ValueError(
                f"`q` is {q.dtype}{list(q.shape)}, not the finite Q of an array {list(row_shape)}"
            )
        if not isinstance(state["steps"], int) or state["steps"] < 0:
            raise ValueError(f"`steps` is {state['steps']!r}, not a number of steps")

    def state_text(self, state: State) -> str:
        """Return the shape of Q and the number of steps."""
        return f"{np.shape(state['q'])} {state['steps']}"


class _Floats:
    """Arrays that are summed together, one behind the other in one."""

    def __init__(self, x: Operand, shapes: Sequence[tuple[int, ...]]) -> None:
        ends = np.cumsum([0, *(int(np.prod(shape, dtype=np.int64)) for shape in shapes)]).tolist()
        self.flat = np.empty(ends[-1], dtype=np.float64 if x.float64 else np.float32)
        self._places = list(zip(ends, ends[1:], shapes, strict=False))
        self.parts = self.like(self.flat)

    def like(self, flat: Buffer) -> list[Buffer]:
        """Return the parts of another array that is laid out alike."""
        return [flat[lo:hi].reshape(shape) for lo, hi, shape in self._places]


@dataclass
class _Task:
    """One matrix of m by k, divided by 2^power; P has the shape (r, m) here and Q (r, k)."""

    i: int
    m: int
    k: int
    r: int
    power: int
    state: State | None

    @property
    def left(self) -> tuple[int, int]:
        """Shape of P."""
        return self.r, self.m

    @property
    def right(self) -> tuple[int, int]:
        """Shape of Q."""
        return self.r, self.k

    @property
    def steps(self) -> int:
        """Steps that Q has behind it."""
        return 0 if self.state is None else int(self.state["steps"])

    def start(self, x: Operand) -> Buffer:
        """Return the Q to begin with."""
        q = gaussian(x.keys[self.i], *self.right) if self.state is None else self.state["q"]
        return np.asarray(q, dtype=np.float64 if x.float64 else np.float32)

    def load(self, x: Operand) -> Buffer:
        """Return this rank's matrix."""
        return scaled(x.load(self.i), -self.power).reshape(self.m, self.k)

    def finish(self, x: Operand, p: Buffer, q: Buffer, own: Buffer, matrix: Buffer) -> None:
        """Write the result, and as residual what this rank's part of it leaves of its matrix."""
        x.store(self.i, product(p, q), self.power)
        if x.feedback:
            rest = scaled(matrix - product(p, own), self.power)
            if self.power > 0:  # a difference may be larger than its parts
                largest = np.finfo(rest.dtype).max
                np.clip(rest, -largest, largest, out=rest)
            x.keep(self.i, rest)


def _first_sum(x: Operand, tasks: Sequence[_Task], plain: Sequence[int]) -> Steps:
    """Sum every M Q, which is returned, and with them the tensors that go as they are."""
    floats = _Floats(x, [*(t.left for t in tasks), *((_size(x, i),) for i in plain)])
    products, others = floats.parts[: len(tasks)], floats.parts[len(tasks) :]
    for t, p in zip(tasks, products, strict=True):
        np.matmul(t.start(x), t.load(x).T, out=p)
    for i, values in zip(plain, others, strict=True):
        np.copyto(values, x.load(i))
    if floats.flat.size:
        yield float_sum(floats.flat)
    for i, values in zip(plain, others, strict=True):
        x.store(i, values)
        if np.isfinite(values).all():
            x.keep(i, np.zeros_like(values))
        else:
            keep_old(x, i)
    return products


def _size(x: Operand, i: int) -> int:
    return int(x.lengths[x.bounds[i] : x.bounds[i + 1]].sum())
