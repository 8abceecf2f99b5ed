"""The local back end: threads of one process, virtual ranks in step, and how a back end is found."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, cast

import numpy as np
import pytest
from gccomm_local import LocalBackend, LockstepGroup, combine, connect, group

import gccomm
from gccomm import backends
from gccomm.errors import BackendError, CollectiveTimeout
from gccomm.operations import OPERATIONS, PROVIDED, reduce_parts

SIZES = (1, 2, 3, 4, 7)


def on_threads(members: list[LocalBackend], work: Callable[[LocalBackend], Any]) -> list[Any]:
    """Call `work` on one thread per member; return what each returned or raised."""
    results: list[Any] = [None] * len(members)

    def body(place: int) -> None:
        try:
            results[place] = work(members[place])
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=body, args=(place,), daemon=True) for place in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "a rank hangs"
    return results


def all_equal(results: list[Any], expected: np.ndarray) -> None:
    for result in results:
        np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize("size", SIZES)
def test_maximum_is_unsigned(size: int) -> None:
    def work(backend: LocalBackend) -> np.ndarray:
        words = np.array([backend.rank, 2**32 - 1 - backend.rank, 2**31 + backend.rank], np.uint32)
        backend.maximum(words)
        return words

    all_equal(on_threads(group(size), work), np.array([size - 1, 2**32 - 1, 2**31 + size - 1], np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_word_sum_wraps(size: int) -> None:
    inputs = np.random.default_rng(3).integers(0, 2**32, (size, 501), np.uint32)

    def work(backend: LocalBackend) -> np.ndarray:
        words = inputs[backend.rank].copy()
        backend.sum_words(words)
        return words

    expected = (inputs.astype(np.uint64).sum(axis=0) % 2**32).astype(np.uint32)
    all_equal(on_threads(group(size), work), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_float_sum_in_rank_order(size: int, dtype: Any) -> None:
    inputs = np.random.default_rng(4).standard_normal((size, 301)).astype(dtype)
    originals = inputs.copy()

    def work(backend: LocalBackend) -> np.ndarray:
        out = np.empty(301, dtype)
        backend.sum_floats(inputs[backend.rank], out, dtype)
        return out

    expected = originals[0]
    for row in originals[1:]:
        expected = expected + row
    all_equal(on_threads(group(size), work), expected)
    np.testing.assert_array_equal(inputs, originals)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_sum_rounds_to_nearest_even(dtype: Any) -> None:
    real = np.dtype(np.float16) if dtype == "float16" else np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    values = np.random.default_rng(5).standard_normal((3, 4001)).astype(real)
    values[0, :4] = [np.inf, np.nan, -0.0, np.finfo(np.float16).max if dtype == "float16" else 3.0e38]
    values[1, :4] = [-np.inf, 1.0, -0.0, values[0, 3]]
    with np.errstate(all="ignore"):
        expected = (values[0].astype(np.float32) + values[1].astype(np.float32)).astype(real)
        expected = (expected.astype(np.float32) + values[2].astype(np.float32)).astype(real)

    def work(backend: LocalBackend) -> np.ndarray:
        words = values[backend.rank].copy().view(np.uint16)
        backend.sum_floats(words, words, dtype)
        return words

    for words in on_threads(group(3), work):
        got = words.view(real).astype(np.float32)
        np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_bfloat16_sum_keeps_every_nan() -> None:
    # a NaN whose payload is all ones would carry into the sign bit if it were rounded
    words = [np.array([0x7FFF, 0xFFFF, 0x7F80], np.uint16), np.array([0, 0, 0xFF80], np.uint16)]
    combine("float", words, dtype="bfloat16")
    assert ((words[0] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("root", range(3))
def test_broadcast(root: int) -> None:
    def work(backend: LocalBackend) -> np.ndarray:
        buffer = np.full(77, backend.rank, np.uint8)
        backend.broadcast(buffer, root)
        return buffer

    all_equal(on_threads(group(3), work), np.full(77, root, np.uint8))


def test_split_by_color_and_key() -> None:
    def work(backend: LocalBackend) -> Any:
        part = backend.split(None if backend.rank == 4 else backend.rank % 2, -backend.rank)
        if part is None:
            return None
        words = np.array([1 << backend.rank], np.uint32)
        part.sum_words(words)
        alone = part.split(part.rank, 0)
        assert alone is not None
        return part.rank, part.size, int(words[0]), alone.rank, alone.size

    assert on_threads(group(5), work) == [
        (1, 2, 5, 0, 1),
        (1, 2, 10, 0, 1),
        (0, 2, 5, 0, 1),
        (0, 2, 10, 0, 1),
        None,
    ]


def test_argument_errors_leave_the_group_usable() -> None:
    def work(backend: LocalBackend) -> int:
        with pytest.raises(ValueError, match="`root` must be a rank"):
            backend.broadcast(np.zeros(1, np.uint8), 2)
        with pytest.raises(ValueError, match="`color` must be None or at least 0"):
            backend.split(-1, 0)
        words = np.ones(1, np.uint32)
        backend.sum_words(words)
        return int(words[0])

    assert on_threads(group(2), work) == [2, 2]


@pytest.mark.parametrize("summing", [(0,), (1, 2), (0, 3)])
def test_a_maximum_and_a_sum_of_one_size_meet(summing: tuple[int, ...]) -> None:
    inputs = np.random.default_rng(7).integers(0, 2**32, (4, 256), np.uint32)

    def work(backend: LocalBackend) -> tuple[np.ndarray, np.ndarray]:
        words, ones = inputs[backend.rank].copy(), np.ones(3, np.uint32)
        (backend.sum_words if backend.rank in summing else backend.maximum)(words)
        backend.sum_words(ones)  # the group is still whole
        return words, ones

    total, largest = inputs.sum(axis=0, dtype=np.uint32), inputs.max(axis=0)
    for rank, (words, ones) in enumerate(on_threads(group(4), work)):
        np.testing.assert_array_equal(words, total if rank in summing else largest, strict=True)
        assert ones.tolist() == [4, 4, 4]


def in_other_size(backend: LocalBackend) -> None:
    (backend.maximum if backend.rank else backend.sum_words)(np.ones(4 + backend.rank, np.uint32))


def in_other_kind(backend: LocalBackend) -> None:
    if backend.rank == 1:
        backend.sum_floats(np.ones(4, np.float32), np.ones(4, np.float32), "float32")
    else:
        backend.sum_words(np.ones(4, np.uint32))


def in_other_operation(backend: LocalBackend) -> None:
    backend.combine_words(np.ones(4, np.uint32), ("saturate:4", "saturate:8", "exponent")[backend.rank], 0)


def with_other_seed(backend: LocalBackend) -> None:
    backend.combine_words(np.ones(4, np.uint32), "exponent", backend.rank)


@pytest.mark.parametrize("work", [in_other_size, in_other_kind, in_other_operation, with_other_seed])
def test_different_operations_are_an_error_on_every_rank(work: Callable[[LocalBackend], None]) -> None:
    results = on_threads(group(3), work)
    assert all(isinstance(result, BackendError) for result in results)
    assert all("different operations" in str(result) for result in results)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@pytest.mark.parametrize("size", SIZES)
def test_own_operations(size: int, operation: str) -> None:
    inputs = np.random.default_rng(size).integers(0, 2**32, (size, 301), np.uint32)

    def work(backend: LocalBackend) -> np.ndarray:
        words = inputs[backend.rank].copy()
        backend.combine_words(words, operation, 17)
        return words

    expected = np.empty(301, np.uint32)
    reduce_parts(operation, 17, list(inputs.copy()), 0, expected)
    all_equal(on_threads(group(size), work), expected)
    buffers = [row.copy() for row in inputs]
    LockstepGroup(size).combine("own", buffers, operation=operation, seed=17)
    all_equal(buffers, expected)


def test_unknown_operations_leave_the_group_usable() -> None:
    def work(backend: LocalBackend) -> int:
        words = np.ones(1, np.uint32)
        with pytest.raises(ValueError, match="`operation` must be one of"):
            backend.combine_words(words, "minimum", 0)
        with pytest.raises(ValueError, match="`seed` must be"):
            backend.combine_words(words, "exponent", -1)
        backend.sum_words(words)
        return int(words[0])

    assert on_threads(group(2), work) == [2, 2]
    with pytest.raises(ValueError, match="`operation` must be one of"):
        combine("own", [np.ones(1, np.uint32)], operation="minimum")


def test_a_back_end_says_what_it_can_reduce_with() -> None:
    assert backends.operations_of(connect()) == PROVIDED
    assert backends.operations_of(cast("backends.Backend", object())) == frozenset()


def test_abort_ends_waits_in_subgroups_and_later_calls() -> None:
    members = group(3)

    def work(backend: LocalBackend) -> None:
        part = backend.split(0, 0)
        assert part is not None
        if backend.rank == 1:
            backend.abort("it fell over")
        else:
            part.sum_words(np.ones(4, np.uint32))

    results = on_threads(members, work)
    assert results[1] is None
    for result in (results[0], results[2]):
        assert isinstance(result, BackendError)
        assert "rank 1 aborted: it fell over" in str(result)
    with pytest.raises(BackendError, match="it fell over"):
        members[1].maximum(np.ones(1, np.uint32))
    members[1].close()


def test_timeout_names_rank_operation_and_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.1")
    members = group(2)
    members[0].set_activity(lambda: "all-reduce of 'w'")
    with pytest.raises(CollectiveTimeout, match=r"rank 0 of 2 .* sum of 3 words \(all-reduce of 'w'\)"):
        members[0].sum_words(np.ones(3, np.uint32))
    with pytest.raises(BackendError, match="rank 0 left sum of 3 words"):
        members[1].sum_words(np.ones(3, np.uint32))


def test_stall_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GCCOMM_STALL_S", "0.05")
    members = group(2)
    members[0].set_activity("step 3")

    def work(backend: LocalBackend) -> None:
        if backend.rank == 1:
            time.sleep(0.4)
        backend.sum_words(np.ones(3, np.uint32))

    assert on_threads(members, work) == [None, None]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "rank 0 of 2 has waited" in lines[0]
    assert "sum of 3 words (step 3)" in lines[0]


def test_interrupt_deadline_ends_the_wait() -> None:
    members = group(2)
    members[0].interrupt_deadline = time.monotonic() + 0.05
    with pytest.raises(BackendError, match="interrupted"):
        members[0].sum_words(np.ones(3, np.uint32))
    with pytest.raises(BackendError, match="rank 0 left"):
        members[1].sum_words(np.ones(3, np.uint32))


def test_closed_handle_refuses() -> None:
    backend = connect()
    assert (backend.rank, backend.size, backend.local_rank, backend.one_host) == (0, 1, 0, True)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.maximum(np.ones(1, np.uint32))


def test_connect_and_group_check_arguments() -> None:
    with pytest.raises(TypeError, match="takes no `comm`; got str"):
        connect("world")
    with pytest.raises(ValueError, match="at least 1; got 0"):
        group(0)


@pytest.mark.parametrize(
    ("kind", "dtype", "item"),
    [
        ("max", None, np.uint32),
        ("sum", None, np.uint32),
        ("float", "float64", np.float64),
        ("float", "bfloat16", np.uint16),
    ],
)
def test_lockstep_gives_what_threads_give(kind: Any, dtype: Any, item: Any) -> None:
    raw = np.random.default_rng(6).integers(0, 2**15, (4, 99))
    inputs = raw.astype(item)
    operations: dict[str, Callable[[LocalBackend, np.ndarray], None]] = {
        "max": lambda backend, array: backend.maximum(array),
        "sum": lambda backend, array: backend.sum_words(array),
        "float": lambda backend, array: backend.sum_floats(array, array, dtype),
    }

    def work(backend: LocalBackend) -> np.ndarray:
        array = inputs[backend.rank].copy()
        operations[kind](backend, array)
        return array

    buffers = [row.copy() for row in inputs]
    LockstepGroup(4).combine(kind, buffers, dtype=dtype)
    all_equal(on_threads(group(4), work), buffers[0])
    all_equal(buffers, buffers[0])


def test_lockstep_checks_its_buffers() -> None:
    lockstep = LockstepGroup(2)
    words = np.ones(2, np.uint32)
    with pytest.raises(ValueError, match="needs 2 buffers; got 1"):
        lockstep.combine("sum", [words])
    with pytest.raises(ValueError, match="equal arrays of uint32"):
        lockstep.combine("max", [words, words.astype(np.int64)])
    with pytest.raises(ValueError, match="equal arrays"):
        lockstep.combine("float", [np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="`root` must be a rank"):
        lockstep.broadcast([words, words.copy()], 2)
    with pytest.raises(ValueError, match="at least 1"):
        LockstepGroup(0)
    other = np.zeros(2, np.uint32)
    lockstep.broadcast([words, other], 0)
    np.testing.assert_array_equal(other, words)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the local back end and one that cannot be imported, whatever is installed."""
    points = [
        EntryPoint("local", "gccomm_local:connect", backends.ENTRY_POINT_GROUP),
        EntryPoint("ruin", "gccomm_no_such_module:connect", backends.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(backends, "entry_points", lambda group: points)


@pytest.mark.usefixtures("registered")
def test_back_ends_are_found_through_entry_points() -> None:
    assert backends.available() == ["local", "ruin"]
    assert backends.load("local") is connect
    with pytest.raises(ValueError, match=r"no back end `locl` is installed.*did you mean 'local'"):
        backends.load("locl")
    with pytest.raises(BackendError, match=r"`ruin` .gccomm_no_such_module:connect. cannot be imported"):
        backends.load("ruin")


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"SLURM_MPI_TYPE": "pmix"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2),
        ({"PMI_SIZE": "many"}, None),
        ({"PMIX_RANK": "0"}, None),
        ({"MPI_LOCALNRANKS": "2"}, None),
    ],
)
def test_launchers_are_recognised(environ: dict[str, str], size: int | None) -> None:
    found = backends.launcher(environ)
    assert found is not None
    assert found[1] == size
    assert backends.detect(environ) == "mpi"


@pytest.mark.parametrize("environ", [{}, {"SLURM_NTASKS": "4"}, {"SLURM_MPI_TYPE": "none"}])
def test_no_launcher_means_local(environ: dict[str, str]) -> None:
    assert backends.launcher(environ) is None
    assert backends.detect(environ) == "local"


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_waiting_times_must_be_numbers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="GCCOMM_TIMEOUT_S must be a number of seconds"):
        connect()


def test_importing_the_mpi_back_end_imports_no_mpi() -> None:
    code = "import sys, gccomm_mpi, gccomm.backends; sys.exit('mpi4py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_missing_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import gccomm_mpi

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendError, match=r"needs mpi4py.*pip install \"gccomm\[mpich\]\""):
        gccomm_mpi.connect()


def test_init_called_by_what_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a script of the name of a package: said at once, where it would wait for itself."""

    def connect(**how: Any) -> Any:
        return gccomm.init("local", **how)

    monkeypatch.setattr(backends, "load", lambda name: connect)
    for _ in range(2):
        with pytest.raises(BackendError, match="called again by something that it imports"):
            gccomm.init("mpi")
