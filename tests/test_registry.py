"""Codecs by id: options, unknown ids, installed packages, and registration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import Codec, get_codec, list_codecs, register_codec, registry
from gccomm.codecs.uniform import Uniform
from gccomm.errors import UnknownCodecError
from gccomm.steps import Agree, Context, Steps, Sum


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test registers or loads to that test."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))


class Halves(Codec):
    """A third party's codec: whole numbers of halves, in 16-bit lanes; the options are of every JSON type."""

    id: ClassVar[str] = "test-halves"
    lossy: ClassVar[bool] = False

    def __init__(self, scale: float = 0.5, name: str = "h", flags: bool = False, extra: Any = None) -> None:
        self.scale, self.name, self.flags, self.extra = scale, name, flags, extra

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-lengths // 2)

    def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
        scales = yield Agree(x.blocks, x.maxima)
        yield Sum(
            x.blocks,
            x.size,
            lambda lo, hi, out: x.encode(lo, hi, out, scales, 16, 65536 * 100 // ctx.size, ctx),
            lambda lo, hi, w: x.decode(lo, hi, w, scales, 16, 65536 * 100 // ctx.size, ctx, subtract=False),
            lambda lo, hi: ((0, x.size(lo, hi), 16),),
        )
        return state


def test_the_list_is_sorted_and_complete() -> None:
    ids = list_codecs()
    assert ids == sorted(set(ids))
    assert {"raw", "bf16", "fp16", "uniform"} <= set(ids)
    for codec_id in ids:
        assert get_codec(codec_id).id == codec_id


def test_the_package_exports_the_registry() -> None:
    assert gccomm.get_codec is get_codec
    assert gccomm.list_codecs is list_codecs
    assert gccomm.register_codec is register_codec


@pytest.mark.parametrize(
    "same",
    [
        "uniform:wire_bits=4",
        " uniform : wire_bits = 4 ",
        "uniform:wire_bits=4,",
        {"id": "uniform", "wire_bits": 4},
        Uniform(4),
        Uniform(wire_bits=4),
    ],
)
def test_ways_to_name_a_codec(same: Any) -> None:
    assert get_codec(same) == Uniform(4)
    assert get_codec("uniform", wire_bits=4) == get_codec("uniform:wire_bits=16", wire_bits=4) == Uniform(4)
    assert get_codec({"id": "uniform", "wire_bits": 16}, wire_bits=4) == Uniform(4)


def test_an_object_comes_back_as_it_is() -> None:
    codec = Uniform(5)
    assert get_codec(codec) is codec
    with pytest.raises(TypeError, match=r"options \['wire_bits'\].*Uniform\(wire_bits=5\)"):
        get_codec(codec, wire_bits=4)


def test_equality_and_hash_go_by_the_configuration() -> None:
    assert Uniform(4) == Uniform(4) != Uniform(5)
    assert len({Uniform(4), Uniform(4), Uniform(5), get_codec("raw"), get_codec("bf16")}) == 4
    assert Uniform(4) != "uniform:wire_bits=4"

    class Other(Uniform):
        """The same format under another class is not the same codec."""

    assert Other(4) != Uniform(4)


def test_option_texts_become_values() -> None:
    register_codec(Halves)
    codec = get_codec("test-halves:scale=0.25,name=a b,flags=true,extra=null")
    assert (codec.config()) == {
        "id": "test-halves",
        "scale": 0.25,
        "name": "a b",
        "flags": True,
        "extra": None,
    }
    again = get_codec("test-halves:flags=False,extra=None,scale=1e-3")
    assert again.config() == {"id": "test-halves", "scale": 0.001, "name": "h", "flags": False, "extra": None}
    assert get_codec(json.loads(json.dumps(codec.config()))) == codec
    assert eval(repr(codec), {"Halves": Halves}) == codec


@pytest.mark.parametrize("text", ["uniform:4", "uniform:wire_bits", "uniform:wire_bits=4,8"])
def test_options_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="option=value"):
        get_codec(text)


@pytest.mark.parametrize("codec", ["uniform:bits=4", {"id": "uniform", "bits": 4}])
def test_unknown_options_are_refused_with_the_known_ones(codec: Any) -> None:
    with pytest.raises(TypeError, match=r"'uniform' has no option 'bits'; it has wire_bits"):
        get_codec(codec)
    with pytest.raises(TypeError, match=r"'raw' has no option 'bits'; it has none"):
        get_codec("raw", bits=4)


@pytest.mark.parametrize("text", ["uniform:wire_bits=7", "uniform:wire_bits=four", "uniform:wire_bits=true"])
def test_bad_values_are_refused(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match="wire_bits"):
        get_codec(text)


@pytest.mark.parametrize("codec", [None, 3, 0.5, ["uniform"], {"wire_bits": 4}, {"id": 3}, Uniform, b"raw"])
def test_what_names_no_codec_is_refused(codec: Any) -> None:
    with pytest.raises(TypeError, match="must be an id, a configuration with an 'id', or a Codec, got"):
        get_codec(codec)


@pytest.mark.parametrize(("wrong", "near"), [("unifrom", "uniform"), ("bf-16", "bf16"), ("Raw", "raw")])
def test_unknown_ids_name_a_near_one(wrong: str, near: str) -> None:
    with pytest.raises(
        UnknownCodecError, match=rf"no codec has the id '{wrong}'.*did you mean '{near}'\?"
    ) as caught:
        get_codec(f"{wrong}:wire_bits=4")
    assert caught.value.codec_id == wrong
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, gccomm.GccommError)
    assert all(codec_id in str(caught.value) for codec_id in list_codecs())


@pytest.mark.parametrize("wrong", ["zzzzzzzz", "", ":wire_bits=4"])
def test_unknown_ids_without_a_near_one(wrong: str) -> None:
    with pytest.raises(UnknownCodecError, match="no codec has the id") as caught:
        get_codec(wrong)
    assert "did you mean" not in str(caught.value)


def test_unknown_ids_fail_alike_on_all_ranks() -> None:
    def attempt(comm: gccomm.Communicator) -> tuple[str, float]:
        try:
            comm.compressed_allreduce(np.ones(3), codec="unifrom" if comm.rank == 1 else "uniform")
        except UnknownCodecError as error:
            return str(error), float(comm.compressed_allreduce(1.0))
        raise AssertionError("no rank may succeed")

    results = testing.run(attempt, 3)
    assert len({text for text, _ in results}) == 1
    assert "rank 1: no codec has the id 'unifrom'" in results[0][0]
    assert [value for _, value in results] == [3.0] * 3  # the communicator is still usable


def test_registration() -> None:
    assert "test-halves" not in list_codecs()
    assert register_codec(Halves) is Halves
    assert "test-halves" in list_codecs()
    assert get_codec("test-halves:scale=2") == Halves(2)
    xs = [np.linspace(-1, 1, 3000, dtype=np.float32) for _ in range(4)]
    ys, stats = testing.simulate(xs, "test-halves")
    assert np.abs(ys[0] - 4 * xs[0]).max() <= 4 * 4 / 100
    assert stats[0].codecs == {"test-halves": 3000}


def test_an_id_is_registered_once() -> None:
    register_codec(Halves)
    assert register_codec(Halves) is Halves  # the same once more

    class Better(Halves):
        """Takes the place of the first."""

    with pytest.raises(ValueError, match="'test-halves' exists already; pass replace=True"):
        register_codec(Better)
    assert register_codec(Better, replace=True) is Better
    assert type(get_codec("test-halves")) is Better
    with pytest.raises(ValueError, match="'raw' exists already"):
        register_codec(type("Mine", (Halves,), {"id": "raw"}))


@pytest.mark.parametrize("thing", [None, "uniform", Uniform(4), int, type("NoId", (Codec,), {})])
def test_what_is_no_codec_class_is_refused(thing: Any) -> None:
    before = list_codecs()
    with pytest.raises(TypeError, match="a codec is a subclass of"):
        register_codec(thing)
    assert list_codecs() == before


def install(folder: Path, module: str, source: str, entry_points: str) -> None:
    """Lay out an installed distribution, as pip would."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


SOURCE = """
from gccomm import register_codec
from gccomm.codecs.uniform import Uniform

@register_codec  # which an entry point makes superfluous
class Installed(Uniform):
    id = "test-installed"
"""


def test_installed_packages_add_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[gccomm.codecs]\ntest-installed = gccomm_test_plugin:Installed\n"
    install(tmp_path, "gccomm_test_plugin", SOURCE, points)
    assert "test-installed" not in list_codecs()
    monkeypatch.syspath_prepend(tmp_path)
    assert "test-installed" in list_codecs()
    assert "gccomm_test_plugin" not in sys.modules  # listing imports nothing
    codec = get_codec("test-installed:wire_bits=4")
    assert type(codec).__module__ == "gccomm_test_plugin"
    assert codec.config() == {"id": "test-installed", "wire_bits": 4, "scales": "agreed", "widening": False}
    ys, _ = testing.simulate([np.ones(2000, np.float32)] * 2, "test-installed")
    np.testing.assert_allclose(ys[0], 2, rtol=0.02)
    with pytest.raises(UnknownCodecError, match="did you mean 'test-installed'"):
        get_codec("test-instaled")
    with pytest.raises(ValueError, match="exists already"):
        register_codec(type("Clash", (Halves,), {"id": "test-installed"}))
    monkeypatch.delitem(sys.modules, "gccomm_test_plugin")


def test_an_installed_package_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[gccomm.codecs]\ntest-broken = gccomm_broken_plugin:Nothing\n"
    install(tmp_path, "gccomm_broken_plugin", "raise RuntimeError('no such device')\n", points)
    monkeypatch.syspath_prepend(tmp_path)
    assert get_codec("raw").id == "raw"  # the others are not touched
    with pytest.raises(RuntimeError, match="no such device"):
        get_codec("test-broken")


@pytest.mark.parametrize(("name", "target"), [("test-other", "Installed"), ("test-function", "len")])
def test_an_installed_object_must_be_the_codec_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str
) -> None:
    """Else a configuration would not round-trip: its id would be another, or there would be none."""
    source = f"{SOURCE}\nlen = len\n"
    install(tmp_path, "gccomm_odd_plugin", source, f"[gccomm.codecs]\n{name} = gccomm_odd_plugin:{target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((TypeError, ValueError), match=name):
        get_codec(name)
    monkeypatch.delitem(sys.modules, "gccomm_odd_plugin")


def test_what_is_installed_does_not_replace_a_built_in_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "gccomm_clash_plugin", SOURCE, "[gccomm.codecs]\nraw = gccomm_clash_plugin:Installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry._loaded.clear()
    assert type(get_codec("raw")).__module__ == "gccomm.codecs.floats"
    assert list_codecs().count("raw") == 1


def test_an_option_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'wire_bits' is given twice in 'uniform:wire_bits=4,wire_bits=8'"):
        get_codec("uniform:wire_bits=4,wire_bits=8")
