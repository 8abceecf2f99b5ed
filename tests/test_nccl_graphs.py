"""Steps over NCCL that are captured in graphs, and launched."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.communicator import Communicator
from tests.fake_gpu import GLOBAL, Action, ndarray
from tests.gpu.programs import launched
from tests.nccl_site import FLOWING, Site, all_raise, same, site

__all__ = ["site"]


class Captured:
    """A step of a reducer in a graph, on one rank."""

    def __init__(
        self,
        site: Site,
        comm: Communicator,
        codec: str,
        x: np.ndarray,
        *,
        feedback: bool = False,
        mode: int | None = None,
    ) -> None:
        self.site, cupy = site, site.machine.cupy
        self.stream = site.machine.current_stream(comm.rank)
        self.reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=feedback)
        self.input = site.there({"w": x}, comm.rank)
        for _ in range(4):  # the first three are measured
            self.reducer(self.input)
        comm.synchronize()
        del cupy
        self.stream.begin_capture(mode)
        self.output = self.reducer(self.input)
        self.graph = self.stream.end_capture()

    def launch(self, x: np.ndarray) -> Any:
        """Launch with another input, written where the graph reads it; return what it leaves."""
        target = self.input["w"].host()
        with self.site.machine.changed:
            self.stream.put(Action(lambda: np.copyto(target, x)))
        self.graph.launch(self.stream)
        return self.site.back(self.output)["w"]


def draws(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(5000).astype(np.float32)


@pytest.mark.parametrize("codec", FLOWING)
def test_steps_can_be_captured_and_launched(site: Site, codec: str) -> None:
    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, codec, draws(0, comm.rank))
        gc.collect()  # what the graph needs is kept by gccomm
        waits = [b.waits for b in comm._boards.found.values()]
        found = [captured.launch(draws(step, comm.rank)) for step in range(1, 4)]
        assert [b.waits for b in comm._boards.found.values()] == waits
        comm.synchronize()
        eager = site.back(comm.compressed_allreduce(site.there(draws(1, comm.rank), comm.rank), codec=codec))
        return found, eager

    results = site.run(3, program)
    for step in range(1, 4):
        total = np.sum([draws(step, rank).astype(np.float64) for rank in range(3)], axis=0)
        error = np.linalg.norm(results[0][0][step - 1] - total) / np.linalg.norm(total)
        wanted = np.linalg.norm(
            results[0][1] - np.sum([draws(1, r) for r in range(3)], axis=0)
        ) / np.linalg.norm(total)
        assert error < 2 * wanted + 1e-6
        assert all(same(results[rank][0][step - 1], results[0][0][step - 1]) for rank in range(3))


def test_launches_differ_in_their_noise(site: Site) -> None:
    x = draws(0, 0)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "rotated:wire_bits=4,headroom=safe", x)
        return [captured.launch(x) for _ in range(24)]

    found = site.run(2, program)[0]
    errors = [y.astype(np.float64) - 2 * x for y in found]
    assert len({y.tobytes() for y in found}) == 24
    one, mean = (np.linalg.norm(e) for e in (errors[0], np.mean(errors, axis=0)))
    assert mean < 0.3 * one  # errors cancel: 1 / sqrt(24) is 0.2


def test_residuals_go_from_launch_to_launch(site: Site) -> None:
    x = draws(0, 0)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform:wire_bits=4", x, feedback=True)
        return [captured.launch(x) for _ in range(10)], captured.reducer.state_dict()["residuals"]["w"]

    (found, residual), (_, other) = site.run(2, program)
    sums = np.sum(found, axis=0, dtype=np.float64) - 20 * x
    one = np.linalg.norm(found[0] - 2 * x)
    assert np.linalg.norm(sums) < 4 * one  # it does not grow with the number of launches
    assert np.linalg.norm(residual) > 0
    assert np.linalg.norm(other) > 0


def test_what_is_wrong_in_a_launch_is_seen_after_it(site: Site) -> None:
    """Ranks that launch differently often: the tags of sums do not hang on that, but noise does; a rank that
    makes another call meanwhile is seen by the others' graph."""
    marks = threading.Barrier(2)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, comm.rank))
        marks.wait(30)
        if comm.rank == 1:
            return comm.compressed_allreduce(site.there(np.ones(9000, np.float32), 1), codec="uniform")
        y = captured.launch(draws(1, 0))
        assert np.isnan(y).all()
        return comm.synchronize()

    results = all_raise(site, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results)


@pytest.mark.parametrize(
    ("codec", "dtype"), [("thc", "float32"), ("rotated:headroom=checked", "float32"), ("uniform", "int32")]
)
def test_what_the_host_has_to_look_at_cannot_be_captured(site: Site, codec: str, dtype: str) -> None:
    def program(comm: Communicator) -> Any:
        stream = site.machine.current_stream(comm.rank)
        x = site.there(np.ones(3000, dtype), comm.rank)
        comm.compressed_allreduce(x, codec=codec)
        stream.begin_capture()
        with pytest.raises(gccomm.NegotiationError, match="cannot be captured in a graph"):
            comm.compressed_allreduce(x, codec=codec)
        stream.end_capture()
        return site.back(comm.compressed_allreduce(x, codec=codec))

    for found in site.run(2, program):
        assert abs(found.mean() - 2) < 0.2


def test_a_layout_that_is_not_known_cannot_be_captured(site: Site) -> None:
    def program(comm: Communicator) -> None:
        stream = site.machine.current_stream(comm.rank)
        x = site.there(np.ones(3000, np.float32), comm.rank)
        stream.begin_capture()
        with pytest.raises(
            gccomm.NegotiationError, match=r"after such calls outside of the graph \(warm-up\)"
        ):
            comm.compressed_allreduce(x, codec="uniform")
        stream.end_capture()
        comm.compressed_allreduce(x, codec="uniform")

    site.run(2, program)


def test_synchronize_waits_for_launches(site: Site) -> None:
    """They are on the program's stream, which nobody else has waited for when what is wrong is asked for."""

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, comm.rank))
        if comm.rank == 1:
            return comm.compressed_allreduce(site.there(np.ones(9000, np.float32), 1), codec="uniform")
        captured.graph.launch(captured.stream)
        return comm.synchronize()

    results = all_raise(site, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results)


def test_launches_that_others_do_not_make_come_to_an_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread watches them; what waits for them is watched."""
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "1")
    over = threading.Event()

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, comm.rank))
        if comm.rank == 1:
            over.wait(30)
            raise gccomm.CollectiveTimeout("it has not launched")
        captured.graph.launch(captured.stream)
        try:
            return comm.synchronize()
        finally:
            over.set()

    assert all(isinstance(result, gccomm.CollectiveTimeout) for result in all_raise(site, 2, program))


def test_closing_waits_for_launches(site: Site) -> None:
    """They write to memory that the communicator keeps."""
    ran: list[Any] = []

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, comm.rank))
        captured.graph.launch(captured.stream)
        put = Action(lambda: ran.append(comm.rank))
        with site.machine.changed:
            captured.stream.put(put)
        comm.close()
        return sorted(ran)

    found = site.run(2, program, closes=False)
    assert all(rank in ranks for rank, ranks in enumerate(found))


def test_captures_of_any_mode_are_left_whole(site: Site) -> None:
    """CUDA's default mode, which is PyTorch's, forbids all threads to allocate and to ask for events."""

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, 0), feedback=True, mode=GLOBAL)
        found = captured.launch(draws(1, 0))
        eager, watchdog = site.there(draws(2, 0), 0), comm._backend.channel.watchdog
        comm.compressed_allreduce(eager, codec="uniform")
        captured.stream.begin_capture(GLOBAL)  # of something else
        end = time.monotonic() + 10
        while watchdog.on_their_way and time.monotonic() < end:  # its thread asks for events
            time.sleep(0.01)
        assert watchdog.on_their_way == 0
        captured.stream.end_capture()
        comm.synchronize()
        return found

    (found,) = site.run(1, program)
    assert np.linalg.norm(found - draws(1, 0)) < 0.02 * np.linalg.norm(found)


@pytest.mark.parametrize("broken", [False, True])
def test_communicators_end_though_graphs_live(site: Site, broken: bool) -> None:
    """NCCL frees a communicator when the last graph of it has gone, and waits as long."""
    kept: list[Any] = []
    channels: list[Any] = []

    def program(comm: Communicator) -> Any:
        kept.append(Captured(site, comm, "uniform", draws(0, comm.rank)).graph)
        channels.append(comm._backend.channel)
        if broken:
            comm._backend.abort("the test wants it")

    site.run(2, program, closes=not broken)
    comms = [comm for comm in site.nccl.comms if comm.graphs]
    assert len(comms) == 2
    assert not any(comm.destroyed for comm in comms)
    assert all(comm.aborted == broken for comm in comms)
    kept.clear()
    gc.collect()
    end = time.monotonic() + 10
    while any(comm.graphs or not (comm.destroyed or broken) for comm in comms) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(comm.destroyed != broken for comm in comms)


def test_the_program_of_ranks_on_a_gpu_launches_a_graph(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, machine = site.machine.cupy, site.machine

    def doubled(array: ndarray, factor: int) -> ndarray:
        memory = array.host()
        with machine.changed:
            machine.current_stream().put(Action(lambda: np.multiply(memory, factor, out=memory)))
        return array

    monkeypatch.setattr(cupy, "full", lambda *what: cupy.asarray(np.full(*what)), raising=False)
    monkeypatch.setattr(ndarray, "__imul__", doubled, raising=False)
    site.run(2, lambda comm: launched(comm, cupy))
