"""``Reducer``: a stream of reductions of the same tree, with state per key."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from gccomm.checks import check_options, integer, pattern_choice
from gccomm.codecs import Codec, get_codec
from gccomm.communicator import Communicator
from gccomm.errors import GccommError
from gccomm.pushes import Pushes
from gccomm.reduction import KeyState, Options, Reduction
from gccomm.remembered import known_from, layout_of, state_from
from gccomm.stats import Stats

__all__ = ["Reducer"]

STATE_VERSION = 2


class Reducer:
    """Reduce a tree of arrays step after step.

    Arguments must be equal on all ranks, and reducers must be made in the same order on all ranks; both are
    checked at the first call. Making one is not collective.

    Parameters
    ----------
    codec : str, Codec, or mapping of str to these
        Codec for every key, or patterns (``fnmatch`` style, the first match wins) to codecs; keys that no
        pattern matches use "rotated".
    comm : Communicator, optional
        Default: that of :func:`gccomm.init`.
    op : str or mapping of str to str
        "mean" or "sum", or patterns to these (others: "mean"). Integers need "sum".
    error_feedback : bool, optional
        Add what quantisation lost to the next step's input, per key. Default: on for biased codecs, off for
        unbiased ones. The residual is in the units of the input: feed gradients with the loss scale already
        divided out.
    bucket_bytes : int
        Most bytes of input fused into one message; sums of integer lanes do not depend on it (with checked
        headroom where it is at least 512 KiB, so that a message holds a span).
    exact_below : int
        Arrays with fewer coordinates travel exactly, in two words a coordinate.
    seed : int
        Seed of the rounding noise.
    nonfinite : str
        "propagate" (a block with inf or NaN becomes NaN on all ranks) or "raise".

    Attributes
    ----------
    stats : Stats
        Figures of the last step.
    step : int
        Number of the next step.

    Examples
    --------
    >>> import numpy as np
    >>> reducer = Reducer("rotated", op="mean")
    >>> grads = reducer({"w": np.ones((64, 64), np.float32), "b": np.zeros(3, np.float32)})
    >>> grads["b"]
    array([0., 0., 0.], dtype=float32)
    """

    def __init__(
        self,
        codec: str | Codec | Mapping[str, str | Codec] = "rotated",
        *,
        comm: Communicator | None = None,
        op: str | Mapping[str, str] = "mean",
        error_feedback: bool | None = None,
        bucket_bytes: int = 25 << 20,
        exact_below: int = 1024,
        seed: int = 0,
        nonfinite: str = "propagate",
    ) -> None:
        if not (error_feedback is None or isinstance(error_feedback, bool)):
            msg = f"`error_feedback` must be True, False or None, got {error_feedback!r}"
            raise TypeError(msg)
        ops = dict(op) if isinstance(op, Mapping) else {"*": op}
        for value in ops.values():
            check_options(value, exact_below, nonfinite)
        if isinstance(codec, Mapping):
            codecs: Any = {pattern: get_codec(value) for pattern, value in codec.items()}
        else:
            codecs = get_codec(codec)
        options = Options(
            pattern_choice(codecs, "codec", get_codec("rotated")),
            pattern_choice(ops, "op", "mean"),
            lambda key, chosen: _feedback(key, chosen.biased if error_feedback is None else error_feedback),
            integer("exact_below", exact_below, "a number of coordinates", 0),
            nonfinite,
            integer("seed", seed, "an integer"),
            integer("bucket_bytes", bucket_bytes, "a number of bytes", 1),
            measure=16,
            choices=f"codec={codecs!r}, op={ops!r}, error_feedback={error_feedback}",
        )
        from gccomm.api import resolve

        comm = resolve(comm)
        self.comm = comm
        self._reduction = Reduction(options, reducer=comm.next_reducer(), remember=True)
        self._pushes = Pushes(comm, self._reduction)
        self.stats = Stats()

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self._reduction.step

    def __call__(self, tree: Any, *, out: Any = None) -> Any:
        """Reduce ``tree`` over the ranks; collective.

        Parameters
        ----------
        tree : array, scalar or tree
            Keys, shapes and dtypes equal on all ranks. None for a key that was reduced before counts as
            zeros; None on all ranks stays None.
        out : optional
            Arrays to write the results into, a tree like ``tree``.

        Returns
        -------
        tree
            Results, in the structure, library and dtypes of ``tree``.

        Raises
        ------
        MismatchError
            Ranks differ in anything that must be equal.
        NonFiniteError
            With ``nonfinite="raise"``.
        OverflowError
            A sum of integers does not fit their dtype.
        """
        with self.comm.turn:
            error = None
            if self._pushes.open:
                msg = f"step {self.step} was begun by push(): end it by wait() or discard() first"
                error = ValueError(msg)
            result = self.comm.reduce(self._reduction, tree, out=out, error=error)
            self.stats = self.comm.stats
        return result

    def push(self, key: str, array: Any) -> None:
        """Give one array of the next step, as soon as it is there; :meth:`wait` returns the results.

        Collective over the step: what a rank has not pushed by :meth:`wait` counts as None. Each rank may
        push in an order of its own. From the second step on the arrays travel in buckets of
        ``bucket_bytes``, in the order in which rank 0 pushed in its first step, each once all of it is
        there, while the program goes on. The results are those of a call with a dict of the same items.

        Parameters
        ----------
        key : str
            As in a dict; once a step.
        array : array, scalar or tree
            Not to be changed before :meth:`wait` has returned.

        Notes
        -----
        Never blocks. What is wrong with an argument of one rank is raised by :meth:`wait` on every rank.

        Examples
        --------
        >>> import numpy as np
        >>> reducer = Reducer("rotated", bucket_bytes=1 << 20)
        >>> for key in ("head", "body"):  # as the backward pass gets to them
        ...     reducer.push(key, np.zeros(2000, np.float32))
        >>> sorted(reducer.wait())
        ['body', 'head']
        """
        self._pushes.push(key, array)

    def wait(self) -> dict[str, Any]:
        """End a step that was pushed: return the results by key, of all ranks' keys; collective.

        With checked headroom, and words that stay on a device, this is where the host waits for it, once for
        all buckets, and spans that failed are sent again.

        Raises
        ------
        ValueError, TypeError
            On every rank: one of them has pushed nothing, a key twice, or what cannot be reduced.
        GccommError
            A rank has called :meth:`discard`.
        MismatchError, NonFiniteError, OverflowError
            As of a call.
        NegotiationError
            The MPI library was initialised without threads.
        """
        done = self._pushes.wait()
        self.stats = self.comm.stats = done.stats
        if done.handover is not None:
            done.handover()
        for note in done.notes:
            warnings.warn(note, stacklevel=2)
        return dict(done.result)

    def discard(self) -> None:
        """Give up what was pushed since the last step, on all ranks: nothing is changed.

        Collective: for a program that goes on after an exception between two pushes. Ranks that call
        :meth:`wait` meanwhile get a GccommError that names this rank.
        """
        self._pushes.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, copied: step, layouts, what codecs have adapted, and residuals, by
        key. Not collective. While arrays are pushed it is the state before their step.

        Plain Python and NumPy arrays. Residuals, flat, differ between ranks; everything else is equal on all.
        """
        r = self._reduction
        with self.comm.still():  # a checkpoint thread sees the state between two steps
            return {
                "version": STATE_VERSION,
                "step": r.step,
                "seed": r.options.seed,
                "layouts": {key: layout_of(known) for key, known in r.known.items()},
                "states": {key: _plain(state) for key, state in r.states.items()},
                "residuals": {key: np.array(value) for key, value in r.residuals.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` of the same rank returned. Not collective.

        Raises
        ------
        ValueError
            The state is of another version or seed, or malformed.
        GccommError
            Arrays were pushed since the last step.
        """
        _check_state(state, self._reduction.options.seed)
        known = {key: known_from(key, layout) for key, layout in state["layouts"].items()}
        residuals = {key: np.array(value) for key, value in state["residuals"].items()}
        states = {key: state_from(key, value) for key, value in state["states"].items()}
        self._reduction.check_states(states)
        step = integer("step", state["step"], "a number of steps", 0)
        with self.comm.still():  # not while a step is on its way
            if self._pushes.open:
                msg = "arrays were pushed: end their step by wait() or discard() before load_state_dict()"
                raise GccommError(msg)
            self._reduction.step = step
            self._reduction.known, self._reduction.residuals = known, residuals
            self._reduction.replace_states(states)

    def __repr__(self) -> str:
        return f"<gccomm.Reducer number {self._reduction.reducer}, step {self.step}, on {self.comm!r}>"


def _plain(state: KeyState) -> dict[str, Any]:
    """Return a key's state in plain Python and copies of arrays."""
    values = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.values.items()}
    return {**state._asdict(), "row_shape": list(state.row_shape), "values": values}


def _feedback(key: str, wanted: bool) -> bool:
    if wanted and not key:
        msg = (
            "error feedback needs a key that names the array from step to step: pass a tree such as "
            '{"grad": array} instead of a bare array'
        )
        raise ValueError(msg)
    return wanted


def _check_state(state: Any, seed: int) -> None:
    if not isinstance(state, Mapping):
        msg = f"the state must be a mapping as state_dict() returns, got {state!r}"
        raise ValueError(msg)
    missing = sorted({"version", "step", "seed", "layouts", "states", "residuals"} - set(state))
    if missing:
        msg = f"not the state of a reducer: it lacks {', '.join(missing)}"
        raise ValueError(msg)
    for name, expected in (("version", STATE_VERSION), ("seed", seed)):
        if state[name] != expected:
            msg = f"the state has {name} {state[name]!r}, this reducer {expected!r}"
            raise ValueError(msg)
    for name in ("layouts", "states", "residuals"):
        if not isinstance(state[name], Mapping):
            msg = f"the state's {name} must be a mapping by key, got {state[name]!r}"
            raise ValueError(msg)
    for key, value in state["residuals"].items():
        array = np.asarray(value)
        if array.dtype not in (np.float32, np.float64) or array.ndim != 1:
            found = f"{array.dtype}{list(array.shape)}"
            msg = f"the residual of {key!r} must be flat float32 or float64, got {found}"
            raise ValueError(msg)
        if not np.isfinite(array).all():
            msg = f"the residual of {key!r} holds inf or NaN"
            raise ValueError(msg)
