"""The codec contract.

A codec is one class in one file plus one line in the registry. It describes its wire format and its steps,
and does no communication. Its ``id`` names a wire format for ever: a format that changes gets a new id.
Options are the constructor's keyword arguments and public attributes of the same names; they are part of the
agreement between ranks.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.checks import integer
from gccomm.lanes import WIDTHS
from gccomm.steps import Context, Steps

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Codec", "State", "lane_width", "state_digest"]

State: TypeAlias = Mapping[str, Any]


def state_digest(state: State) -> str:
    """Return a text that differs where states differ: of arrays a check sum, which takes little time."""
    parts = []
    for name, value in sorted(state.items()):
        if isinstance(value, np.ndarray):
            data = np.ascontiguousarray(value)
            total = kernels.digest(kernels.address(data), data.nbytes, 0)
            parts.append(f"{name}={data.dtype.str}{value.shape}:{total:016x}")
        else:
            parts.append(f"{name}={value!r}")
    return ",".join(parts)


class Codec(ABC):
    """Base class of codecs.

    Attributes
    ----------
    id : str
        Name of the wire format.
    lossy : bool
        Tensors below ``exact_below`` coordinates bypass a lossy codec and travel exactly.
    rounds : bool
        What a rank sends differs from its input, so that error feedback has something to feed back.
    sums_as : str
        What the back end adds up, as tables show it: "integer lanes", a float type, "own operation".
    rounding : str
        "unbiased", "to nearest", "biased" or "none", as tables show it.
    biased : bool
        The error has a mean that training would feel: error feedback is on by default.
    unit : str
        "blocks": an operand holds any runs of blocks; "tensor": it holds whole tensors only.
    private : bool
        The rounding noise of an operand differs from rank to rank. (Signs of rotations never do.)
    stateful : bool
        Adapts from step to step, by key, through :meth:`next_state`.
    keeps : bool
        Holds as much as its input between agreement and sum, where ranks share a host.
    sketched : bool
        Its one SUM is of lanes that ``Operand.encode`` writes, so that its error can be measured.
    sums_lanes : bool
        Has the back end agree on scales and sum lanes chunk by chunk, where that can: pieces may be larger
        than the caches then.
    reencodes : bool
        May encode again after results were written, so that these must not overwrite the input.
    operation : str or None
        Operation of the back end's own that the codec reduces with.
    on_devices : bool
        Reads and writes tensors by the operand's kernels alone; else those of devices are copied to the host
        and results back.
    device_words : bool
        Gives words to the operand's functions, or reads and writes them as NumPy's functions do: then they
        may be in the memory of the operand's device, and every look at them waits for that.
    steps_serve : bool
        Where it :meth:`repeats`, an agreement and a sum of words, or a sum of lanes or floats, of one call
        serve later ones: all that depends on the array or on agreed words is computed in the steps' own
        functions, from the array of agreed words that was the answer; sizes are those of the layout; nothing
        follows the sum.
    """

    id: ClassVar[str]
    lossy: ClassVar[bool] = True
    rounds: ClassVar[bool] = True
    sums_as: str = "integer lanes"
    rounding: str = "unbiased"
    biased: bool = False
    unit: ClassVar[str] = "blocks"
    private: ClassVar[bool] = False
    stateful: bool = False
    sketched: bool = False
    keeps: bool = False
    sums_lanes: bool = False
    reencodes: bool = False
    operation: str | None = None
    on_devices: bool = True
    device_words: ClassVar[bool] = False
    steps_serve: ClassVar[bool] = False

    def adds(self, dtype: str, *, mean: bool) -> bool:
        """Return whether the back end adds up arrays of this dtype as they are: where a piece is one range of
        one array, it is read from there and its sum written to the result.
        """
        del dtype, mean
        return False

    def repeats(self, ctx: Context) -> bool:
        """Return whether its steps on one array follow from operand and context alone: neither state nor
        ``ctx.step`` matters, it begins with an agreement on at most a word a block, or with nothing to agree
        on, and never yields a redo. Calls on one array of a single piece then take less time.
        """
        del ctx
        return False

    def flows(self, ctx: Context) -> bool:
        """Return whether all that its steps do with words is what the operand's functions do, so that these
        may stay on a device while the host goes on: nothing depends on what words say, but for what follows a
        :class:`gccomm.steps.Look`.
        """
        del ctx
        return False

    def for_array(self, coordinates: int, ranks: int) -> Codec:
        """Return the codec that carries an array of so many coordinates of ``ranks`` ranks in a Reducer:
        itself, or one of other options that suits the array better.
        """
        del coordinates, ranks
        return self

    def looks(self, ctx: Context) -> bool:
        """Return whether its steps, where they flow, end with a :class:`gccomm.steps.Look`."""
        del ctx
        return False

    @abstractmethod
    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Yield the steps that reduce ``x`` over the ranks.

        Parameters
        ----------
        x : Operand
            Blocks of one or more tensors.
        state : sequence of dict or None
            What each segment's key has adapted, None in the first step; not to be changed.
        ctx : Context
            Rank, size, step.

        Returns
        -------
        list or None
            By way of the generator's return: one entry a segment for :meth:`next_state`.
        """

    def next_state(self, old: State | None, parts: Sequence[Any]) -> State | None:
        """Return the next state of a key from what :meth:`steps` returned for its segments, in order.

        Equal on all ranks, but for what :meth:`state_text` leaves out. Values are int, float, str, bool or
        NumPy arrays: they go into checkpoints.
        """
        del parts
        return old

    def check_state(self, state: State, dtype: str, row_shape: Sequence[int]) -> None:
        """Raise ValueError, KeyError or TypeError for a state of this codec that a checkpoint cannot hold.

        ``dtype`` and ``row_shape`` are those of the key's array, complex numbers as pairs.
        """

    def state_text(self, state: State) -> str:
        """Return what of a key's state must be equal on all ranks."""
        return state_digest(state)

    def carried(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many coordinates travel for blocks of these lengths, padding included."""
        return lengths

    @abstractmethod
    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return how many wire words (or floats) blocks of these lengths take."""

    def weight(self, item_bytes: int) -> float:
        """Return how much of a piece's room a coordinate of ``item_bytes`` takes: 1, more where it may
        need more words, or less where larger pieces are better.
        """
        del item_bytes
        return 1

    def require_size(self, size: int, item_bytes: int) -> None:
        """Raise NegotiationError where ``size`` ranks cannot be served in coordinates of ``item_bytes``."""

    def require_feedback(self, size: int) -> None:
        """Raise NegotiationError where error feedback over ``size`` ranks would not stay bounded."""

    def config(self) -> dict[str, Any]:
        """Return ``{"id": ..., option: value, ...}``, which round-trips through JSON and ``get_codec``."""
        names = list(inspect.signature(type(self)).parameters)
        return {"id": self.id, **{name: getattr(self, name) for name in names}}

    @cached_property
    def fingerprint(self) -> str:
        """The configuration as canonical JSON: what ranks compare. Options never change."""
        return json.dumps(self.config(), sort_keys=True)

    def __setattr__(self, name: str, value: Any) -> None:
        if "fingerprint" in self.__dict__:
            msg = f"codecs are immutable once used: make another one instead of setting {name!r} of {self!r}"
            raise AttributeError(msg)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """Return the codec as it could be made, without options that have their default."""
        known = inspect.signature(type(self)).parameters
        shown = (
            f"{name}={value!r}"
            for name, value in self.config().items()
            if name != "id" and (name == "wire_bits" or value != known[name].default)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self) and isinstance(other, Codec) and other.fingerprint == self.fingerprint
        )

    def __hash__(self) -> int:
        return hash((type(self), self.fingerprint))


def lane_width(wire_bits: object) -> int:
    """Return a quantised codec's ``wire_bits`` option; ValueError where no lane has that width."""
    widths = WIDTHS[:-1]
    if isinstance(wire_bits, bool) or not hasattr(wire_bits, "__index__") or wire_bits not in widths:
        msg = f"`wire_bits` must be one of {', '.join(map(str, widths))}, got {wire_bits!r}"
        raise ValueError(msg)
    return integer("wire_bits", wire_bits, "a lane width")
