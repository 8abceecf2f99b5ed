"""Arrays on a device through whole reductions: the bits of NumPy's, in the order of the caller's streams.

There is no device: CuPy is a stand-in whose streams do nothing before somebody waits for them, memory is
rubbish before it is written and after it is given back, and the kernels run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.arrays import view
from gccomm.errors import BackendError, GccommError, MismatchError, NonFiniteError
from gccomm.interop import order
from tests.devices import cupy, from_device, on_device, other_stream, same, trees, two_devices
from tests.fake_cupy import FakeCupy
from tests.test_cuda_engine import CODECS

__all__ = ["cupy", "two_devices"]

BIASED = ("thc", "powersgd", "topkc", "topkc:values=lanes", "grandk-mn")


def simulated(codec: str, xs: Callable[[int], list[Any]], **options: Any) -> tuple[list[Any], list[Any]]:
    return testing.simulate(xs, codec, steps=3, piece_coordinates=4096, op="sum", **options)


@pytest.mark.parametrize("codec", [*CODECS, "rehop", "uniform:widening=True"])
def test_trees_of_every_dtype_give_the_bits_of_numpy(codec: str, cupy: FakeCupy) -> None:
    ranks = 4 if "checked" in codec else 3
    expected, plain = simulated(codec, lambda step: trees(step, ranks))
    found, stats = simulated(codec, lambda step: [on_device(cupy, tree) for tree in trees(step, ranks)])
    assert all(isinstance(leaf, cupy.ndarray) for tree in found for leaf in tree.values())
    for rank in range(ranks):
        assert same(from_device(cupy, found[rank]), expected[rank])
        assert stats[rank].wire_bytes == plain[rank].wire_bytes
        np.testing.assert_equal(stats[rank].vnmse_estimate, plain[rank].vnmse_estimate)


@pytest.mark.parametrize("codec", ["rotated", "uniform:wire_bits=5", "rehop:wire_bits=3", "intsgd", *BIASED])
@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_residuals_stay_on_the_device(codec: str, hosts: list[int] | None, cupy: FakeCupy) -> None:
    def inputs(step: int) -> list[Any]:
        return [{key: tree[key] for key in ("single", "double", "brain", "long")} for tree in trees(step, 3)]

    options = {"error_feedback": True, "hosts": hosts}
    expected, _ = simulated(codec, inputs, **options)
    found, _ = simulated(codec, lambda step: [on_device(cupy, tree) for tree in inputs(step)], **options)
    assert all(same(from_device(cupy, found[rank]), expected[rank]) for rank in range(3))


def test_hosts_and_devices_may_be_mixed(two_devices: FakeCupy) -> None:
    cupy = two_devices

    def mixed(step: int) -> list[Any]:
        made = trees(step, 2)
        for rank, tree in enumerate(made):
            for key in ("single", "half", "long"):
                tree[key] = on_device(cupy, tree[key], rank)
            tree["double"] = on_device(cupy, tree["double"], 1 - rank)
        return made

    expected, _ = simulated("rotated", lambda step: trees(step, 2))
    found, _ = simulated("rotated", mixed)
    for rank in range(2):
        assert found[rank]["single"].device.id == rank
        assert found[rank]["double"].device.id == 1 - rank
        assert isinstance(found[rank]["brain"], np.ndarray)
        assert same(from_device(cupy, found[rank]), expected[rank])


def test_ranks_have_devices_of_any_number(two_devices: FakeCupy) -> None:
    cupy, xs = two_devices, [tree["single"] for tree in trees(0, 2)]

    def program(comm: Any) -> Any:
        return from_device(cupy, comm.compressed_allreduce(on_device(cupy, xs[comm.rank], comm.rank)))

    expected = testing.simulate(xs)[0]
    assert same(testing.run(program, 2), expected)

    def others(comm: Any) -> Any:
        places = (0, 1, 0) if comm.rank else (0, 0, 0)
        return comm.compressed_allreduce([on_device(cupy, xs[0], place) for place in places])

    with pytest.raises(MismatchError, match="on cuda device 2") as caught:
        testing.run(others, 2)
    assert "array 1" in str(caught.value)

    def one_on_the_host(comm: Any) -> Any:
        return comm.compressed_allreduce(xs[0] if comm.rank else on_device(cupy, xs[0]))

    with pytest.raises(MismatchError, match="on cuda"):
        testing.run(one_on_the_host, 2)


def layouts(cupy: FakeCupy, x: np.ndarray) -> dict[str, tuple[Any, np.ndarray]]:
    """Return views of an array of shape (60, 50), and what NumPy makes of the same."""
    a, item = on_device(cupy, x), x.itemsize
    row = 50 * item
    return {
        "rows": (a.view_as((20, 50), (3 * row, item), row), x[1::3][:20]),
        "transposed": (a.view_as((50, 60), (item, row)), x.T),
        "backwards": (a.view_as((60, 50), (-row, -item), 60 * row - item), x[::-1, ::-1]),
        "broadcast": (a.view_as((30, 50), (0, item), row), np.broadcast_to(x[1], (30, 50))),
        "overlapping": (
            a.view_as((40, 50), (item, item)),
            np.lib.stride_tricks.as_strided(x, (40, 50), (item, item)),
        ),
        "one": (a.view_as((1, 50), (7, item), row), x[1:2]),
        "part": (a.view_as((50,), (item,), row), x[1]),
        "scalar": (a.view_as((), (), row), x[1, 0]),
        "empty": (a.view_as((0, 50), (row, item)), x[:0]),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex128", "int8"])
def test_arrays_of_every_layout(dtype: str, cupy: FakeCupy) -> None:
    x = np.random.default_rng(0).integers(-40, 40, (60, 50)).astype(dtype)
    for name, (there, here) in layouts(cupy, x).items():
        found = testing.simulate([there, there])[0][1]
        expected = testing.simulate([np.ascontiguousarray(here)] * 2)[0][1]
        assert same(cupy.asnumpy(found), np.asarray(expected).reshape(found.shape)), name


def test_numbers_at_odd_addresses(cupy: FakeCupy) -> None:
    values = np.arange(40, dtype=np.float64)
    octets = on_device(cupy, np.concatenate([np.zeros(4, np.uint8), values.view(np.uint8)]))
    x = octets.view_as((40,), (8,), 4)
    x.dtype = np.dtype(np.float64)
    y = octets.view_as((20,), (-16,), 4 + 38 * 8)
    y.dtype = np.dtype(np.complex128)
    assert same(cupy.asnumpy(testing.simulate([x, x])[0][0]), 2 * values)
    pairs = values.view(np.complex128)[::-1]
    assert same(cupy.asnumpy(testing.simulate([y, y])[0][0]), 2 * np.ascontiguousarray(pairs))


# Outputs


@pytest.mark.parametrize("codec", ["rotated", "raw", "rehop"])
def test_outputs_of_every_layout(codec: str, cupy: FakeCupy) -> None:
    xs = [tree["single"][:3000].reshape(60, 50) for tree in trees(0, 2)]
    expected = testing.simulate(xs, codec)[0][0]
    item = 4

    def program(comm: Any) -> list[Any]:
        room = on_device(cupy, np.full((60, 100), 7, np.float32))
        whole = on_device(cupy, np.full((60, 50), 7, np.float32))
        x = on_device(cupy, xs[comm.rank])
        found = []
        for out in (whole, room.view_as((60, 50), (100 * item, 2 * item)), x):
            assert comm.compressed_allreduce(x, codec=codec, out=out) is out
            found.append(cupy.asnumpy(out))
        assert (cupy.asnumpy(room)[:, 1::2] == 7).all()
        return found

    again = testing.run(lambda comm: [comm.compressed_allreduce(xs[comm.rank], codec=codec)] * 3, 2)
    for found in testing.run(program, 2):
        for one, other in zip(found, again[0], strict=True):
            assert one.shape == other.shape == expected.shape
        assert same(found[0], expected)


def test_outputs_of_integers_and_of_failed_calls(cupy: FakeCupy) -> None:
    def program(comm: Any) -> Any:
        out = on_device(cupy, np.full(40, 5, np.int8))
        with pytest.raises(OverflowError, match="40 integer sums do not fit int8"):
            comm.allreduce(on_device(cupy, np.full(40, 100, np.int8)), out=out)
        before = cupy.asnumpy(out)
        comm.allreduce(on_device(cupy, np.full(40, 10, np.int8)), out=out)
        return before, cupy.asnumpy(out)

    for before, after in testing.run(program, 2):
        assert (before == 5).all()
        assert (after == 20).all()


def test_wrong_outputs_are_refused_on_every_rank(two_devices: FakeCupy) -> None:
    cupy = two_devices
    x = np.ones((6, 50), np.float32)

    def refused(make: Callable[[], Any], error: type[Exception], text: str) -> None:
        def program(comm: Any) -> Any:
            there = on_device(cupy, x)
            with pytest.raises(error, match=text):
                comm.allreduce(there, out=make() if comm.rank else on_device(cupy, x))
            return cupy.asnumpy(comm.allreduce(there))

        assert all((found == 2).all() for found in testing.run(program, 2))

    refused(lambda: on_device(cupy, x[0]), ValueError, r"shape \(50,\) cannot take")
    refused(lambda: on_device(cupy, x.astype(np.float64)), ValueError, "dtype float64, shape")
    refused(lambda: x.copy(), ValueError, "on cpu cannot take .* on cuda:0")
    refused(lambda: on_device(cupy, x, 1), ValueError, "on cuda:1 cannot take .* on cuda:0")
    refused(lambda: on_device(cupy, x).view_as((6, 50), (0, 4)), BufferError, "share memory")
    refused(lambda: "out", TypeError, r"numpy\.ndarray, a torch tensor or a cupy\.ndarray")


# What is wrong with an array


def test_values_and_devices_that_cannot_be(cupy: FakeCupy) -> None:
    x = np.ones(3000, np.float32)
    x[1500] = np.inf

    def program(comm: Any) -> Any:
        mine = on_device(cupy, x if comm.rank else np.ones_like(x))
        with pytest.raises(NonFiniteError, match=r"rank 1: .*inf or NaN"):
            comm.compressed_allreduce({"w": mine}, nonfinite="raise")
        return cupy.asnumpy(comm.compressed_allreduce(mine))

    for found in testing.run(program, 2):
        assert np.isnan(found[1024:2048]).all()
        assert np.isfinite(found[:1024]).all()

    class Elsewhere:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 3

        def __dlpack__(self, **_: Any) -> Any:
            raise AssertionError("there is no such device")

    def nowhere(comm: Any) -> Any:
        with pytest.raises((BackendError, GccommError), match="no CUDA device 3: this process sees 1"):
            comm.allreduce(Elsewhere() if comm.rank else np.ones(3))
        return comm.allreduce(np.ones(3))

    assert all((found == 2).all() for found in testing.run(nowhere, 2))


def test_subclasses_and_dtypes_of_no_number(cupy: FakeCupy) -> None:
    class Special(cupy.ndarray):  # type: ignore[name-defined,misc]
        pass

    x = on_device(cupy, np.ones(3, np.float32))
    with pytest.raises(TypeError, match="subclass of cupy"):
        view(Special(x.shape, x.dtype, x.data))
    with pytest.raises(TypeError, match="dtypes are float16"):
        view(cupy.ndarray(x.shape, "V4", x.data))


# Order


def test_results_outlive_their_streams(cupy: FakeCupy) -> None:
    """Memory that a program gives back, while its own stream has still to read it, is not used again."""
    xs = [tree["single"] for tree in trees(0, 2)]
    expected = testing.simulate(xs)[0][0]
    copies = []
    for _ in range(3):
        found = testing.simulate([on_device(cupy, x) for x in xs])[0]
        for one in found:
            copy = on_device(cupy, np.zeros_like(xs[0]))
            copy[...] = one
            copies.append(copy)
        del found, one
    assert all(same(cupy.asnumpy(copy), expected) for copy in copies)


def test_the_program_does_not_wait(cupy: FakeCupy) -> None:
    stream = cupy.current()
    x = on_device(cupy, np.ones(3000, np.int8))
    y = testing.simulate([x, x])[0][0]
    assert stream.waits == 0
    assert stream.todo, "the program's stream has not even begun to follow"
    assert (cupy.asnumpy(y) == 2).all()


def test_nothing_is_left_behind(cupy: FakeCupy) -> None:
    def step() -> None:
        testing.simulate(lambda k: [on_device(cupy, tree) for tree in trees(k, 2)], "rotated", steps=2)

    step()
    cupy.cuda.Device(0).synchronize()
    before = len(cupy.allocated)
    for _ in range(3):
        step()
    cupy.cuda.Device(0).synchronize()
    assert len(cupy.allocated) <= before
    assert cupy.held <= 8


def test_a_handover_that_nobody_takes_is_waited_for(cupy: FakeCupy) -> None:
    x = on_device(cupy, np.ones(3000, np.float32))
    found = view(x)
    order.begin([found])
    queue = found.data.queue
    handover = order.Handover([("cupy", found.data)], [queue], [found])
    stream = cupy.streams[queue.stream]
    assert stream.todo
    del handover
    assert not stream.todo


def test_what_is_on_its_way_goes_on_while_the_host_waits(cupy: FakeCupy) -> None:
    found = view(on_device(cupy, np.arange(3000.0)))
    order.begin([found])
    queue, asked = found.data.queue, []

    def go_on() -> bool:
        asked.append(len(asked))
        return len(asked) < 3

    waits = cupy.streams[queue.stream].waits
    queue.meanwhile(go_on)
    assert np.array(found.data).tolist() == list(range(3000))
    assert len(asked) > 3  # until the device was done, though nothing was on its way any more
    assert cupy.streams[queue.stream].waits == waits
    asked[:] = [0] * 3
    queue.wait()
    assert len(asked) == 4
    assert cupy.streams[queue.stream].waits == waits + 1
    queue.meanwhile(None)


def test_asynchronous_calls_come_after_the_stream_of_the_caller(cupy: FakeCupy) -> None:
    xs = [tree["single"] for tree in trees(0, 2)]
    expected = testing.run(lambda comm: comm.compressed_allreduce(xs[comm.rank]), 2)[0]
    streams = [other_stream(cupy) for _ in range(4)]

    def program(comm: Any) -> Any:
        with streams[comm.rank]:
            work = comm.compressed_allreduce_async(on_device(cupy, xs[comm.rank]))
        with streams[2 + comm.rank]:
            return cupy.asnumpy(work.wait())

    assert all(same(found, expected) for found in testing.run(program, 2))


def test_pushed_steps(cupy: FakeCupy) -> None:
    def steps(comm: Any, place: Callable[[Any], Any], back: Callable[[Any], Any]) -> list[Any]:
        reducer = gccomm.Reducer("rotated:wire_bits=4", comm=comm, error_feedback=True, bucket_bytes=9000)
        found = []
        for step in range(3):
            tree = trees(step, 2)[comm.rank]
            for key in ("single", "half", "brain", "double", "scalar"):
                reducer.push(key, place(tree[key]))
            found.append(back(reducer.wait()))
        return found

    expected = testing.run(lambda comm: steps(comm, lambda x: x, lambda y: y), 2)
    streams = [other_stream(cupy) for _ in range(2)]

    def program(comm: Any) -> Any:
        with streams[comm.rank]:
            return steps(comm, lambda x: on_device(cupy, x), lambda y: from_device(cupy, y))

    assert same(testing.run(program, 2), expected)


# State


def test_state_goes_to_the_host_and_back(cupy: FakeCupy) -> None:
    def run(comm: Any, place: Callable[[Any], Any], back: Callable[[Any], Any], *, resumed: bool) -> Any:
        def make() -> Any:
            return gccomm.Reducer("uniform:wire_bits=5,scales=predicted", comm=comm, error_feedback=True)

        reducer, found = make(), []
        for step in range(4):
            tree = {key: trees(step, 2)[comm.rank][key] for key in ("single", "double", "half")}
            if step == 2 and resumed:
                state, reducer = reducer.state_dict(), make()
                assert all(isinstance(value, np.ndarray) for value in state["residuals"].values())
                reducer.load_state_dict(state)
            tree["half"] = tree["half"] if step < 3 or comm.rank else None
            found.append(back(reducer(place(tree))))
        return found, reducer.state_dict()

    same_place = run, lambda x: x, lambda y: y
    expected = testing.run(lambda comm: run(comm, *same_place[1:], resumed=False), 2)
    there = (lambda x: on_device(cupy, x)), (lambda y: from_device(cupy, y))
    for resumed in (False, True):
        found = testing.run(lambda comm: run(comm, *there, resumed=resumed), 2)  # noqa: B023
        for (results, state), (wanted, other) in zip(found, expected, strict=True):
            assert same(results, wanted)
            assert same(state["residuals"], other["residuals"])
        assert found[0][1]["layouts"] == found[1][1]["layouts"]
        assert found[0][1]["layouts"]["single"][-1] == "cuda"


def test_a_key_that_moves_keeps_its_residual(cupy: FakeCupy) -> None:
    def program(comm: Any, moves: bool) -> Any:
        reducer = gccomm.Reducer("uniform:wire_bits=5", comm=comm, error_feedback=True)
        found = []
        for step in range(4):
            tree = {"w": trees(step, 2)[comm.rank]["single"]}
            found.append(from_device(cupy, reducer(on_device(cupy, tree) if moves and step % 2 else tree)))
        return found

    expected = testing.run(lambda comm: program(comm, False), 2)
    assert same(testing.run(lambda comm: program(comm, True), 2), expected)


def test_keys_without_a_value_come_on_the_device(cupy: FakeCupy) -> None:
    def program(comm: Any) -> Any:
        reducer = gccomm.Reducer("rotated", comm=comm, op="sum")
        x = on_device(cupy, {"w": np.ones(3000, np.float32), "v": np.ones(3, np.float32)})
        reducer(x)
        state = reducer.state_dict()
        again = gccomm.Reducer("rotated", comm=comm, op="sum")
        again.load_state_dict(state)
        some = {"w": None, "v": x["v"]} if comm.rank else x
        return [from_device(cupy, r(some)) for r in (reducer, again)]

    for found in testing.run(program, 2):
        for tree in found:
            assert np.allclose(tree["w"], 1, atol=0.2)
            assert (tree["v"] == 2).all()


def test_broadcasts(cupy: FakeCupy) -> None:
    values = trees(0, 2)

    def program(comm: Any) -> Any:
        mine = on_device(cupy, values[comm.rank])
        return from_device(cupy, comm.broadcast({**mine, "host": np.full(3, comm.rank)}, root=1))

    for found in testing.run(program, 2):
        assert same(found, {**values[1], "host": np.full(3, 1)})
