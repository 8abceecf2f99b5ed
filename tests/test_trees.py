"""Trees: keys, order, containers that come back as they were, and structures that are refused."""

from __future__ import annotations

import enum
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gccomm.trees import flatten, unflatten

Pair = namedtuple("Pair", ["w", "b"])


def round_trip(tree):
    _, leaves, treedef = flatten(tree)
    return unflatten(treedef, leaves)


def test_keys_and_order():
    tree = {"b": [1.0, (2.0, None)], "a": Pair(w=3.0, b={"x": 4.0})}
    keys, leaves, treedef = flatten(tree)
    assert keys == ["a/w", "a/b/x", "b/0", "b/1/0", "b/1/1"]
    assert leaves == [3.0, 4.0, 1.0, 2.0, None]
    assert treedef.leaves == 5
    assert repr(treedef) == "TreeDef(leaves=5)"
    assert unflatten(treedef, [10, 20, 30, 40, 50]) == {"b": [30, (40, 50)], "a": Pair(w=10, b={"x": 20})}


@pytest.mark.parametrize("leaf", [np.ones(3), 1.5, None, "text", b"bytes", object(), {1, 2}, np.float32(2)])
def test_a_bare_leaf_has_the_empty_key(leaf):
    keys, leaves, treedef = flatten(leaf)
    assert keys == [""]
    assert leaves[0] is leaf
    assert unflatten(treedef, ["other"]) == "other"


def test_none_is_a_leaf_and_takes_what_it_is_given():
    keys, leaves, treedef = flatten({"w": None, "nested": (None, 2.0)})
    assert keys == ["nested/0", "nested/1", "w"]
    assert leaves == [None, 2.0, None]
    assert unflatten(treedef, [None, 3.0, 4.0]) == {"w": 4.0, "nested": (None, 3.0)}


@pytest.mark.parametrize("empty", [{}, [], (), OrderedDict(), {"a": [], "b": ({}, ())}, [[[]]]])
def test_empty_containers(empty):
    keys, leaves, treedef = flatten(empty)
    assert (keys, leaves) == ([], [])
    again = unflatten(treedef, [])
    assert again == empty
    assert type(again) is type(empty)


def test_dicts_are_sorted_by_text_and_keep_their_own_order():
    tree = {"b": 1, "a": 2, 10: 3, 9: 4}
    keys, leaves, treedef = flatten(tree)
    assert keys == ["10", "9", "a", "b"]
    assert leaves == [3, 4, 2, 1]
    assert list(unflatten(treedef, leaves).items()) == list(tree.items())
    assert flatten({"x": 1, "y": 2})[0] == flatten({"y": 1, "x": 2})[0]


def test_long_lists_are_in_order_of_position():
    keys, leaves, _ = flatten(list(range(12)))
    assert keys == [str(i) for i in range(12)]
    assert leaves == list(range(12))


class Params(dict):
    """A dict of a user's own type."""


class Frozen(Mapping):
    """An immutable mapping."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@pytest.mark.parametrize("kind", [dict, OrderedDict, Params, Frozen, MappingProxyType, Counter])
def test_mappings_come_back_as_the_same_type(kind):
    tree = kind({"z": 1, "a": 2, "m": 3})
    again = round_trip(tree)
    assert type(again) is kind
    assert list(again.items()) == list(tree.items())
    assert again is not tree


def test_defaultdict_keeps_its_factory():
    tree = defaultdict(list, {"b": 1.0, "a": 2.0})
    again = round_trip(tree)
    assert type(again) is defaultdict
    assert again.default_factory is list
    assert list(again.items()) == list(tree.items())


class Awkward(dict):
    """A dict that cannot be built from a dict."""

    def __init__(self, first, second):
        super().__init__(first=first, second=second)


class Renaming(dict):
    """A dict that changes its keys when it is built."""

    def __init__(self, items):
        super().__init__({f"_{key}": value for key, value in items.items()})


def test_mappings_that_cannot_be_rebuilt_are_refused_at_once():
    with pytest.raises(TypeError, match=r"Awkward cannot be built from a dict.*pass dict\(x\)"):
        flatten({"inner": Awkward(1.0, 2.0)})
    with pytest.raises(TypeError, match=r"Renaming built from a dict has other keys"):
        flatten(Renaming({"a": 1.0}))


class Typed(Pair):
    """A named tuple whose constructor takes something else."""

    def __new__(cls, both):
        return super().__new__(cls, both, both)


def test_named_tuples():
    assert flatten(Typed(1.0))[0] == ["w", "b"]
    again = round_trip(Typed(1.0))
    assert type(again) is Typed
    assert again == (1.0, 1.0)


class Color(enum.IntEnum):
    RED = 1


class Name(enum.StrEnum):
    FIRST = "first"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a", "a"),
        ("", ""),
        (3, "3"),
        (-1, "-1"),
        (True, "True"),
        (1.5, "1.5"),
        (None, "None"),
        (("x", 1), "('x', 1)"),
        (np.int64(7), "7"),
        (Color.RED, "1"),
        (Name.FIRST, "first"),
        ("a/b", "a~1b"),
        ("a~b", "a~0b"),
        ("~1", "~01"),
        ("~/", "~0~1"),
    ],
)
def test_text_of_keys(key, text):
    assert flatten({key: 1.0})[0] == [text]
    assert flatten({"outer": {key: 1.0}})[0] == [f"outer/{text}"]
    assert round_trip({key: 1.0}) == {key: 1.0}


@pytest.mark.parametrize(("first", "second"), [(3, "3"), (None, "None"), (1.5, "1.5"), (True, "True")])
def test_keys_of_one_text_are_refused(first, second):
    with pytest.raises(ValueError, match="have the same text") as caught:
        flatten({"outer": {first: 1.0, second: 2.0}})
    assert repr(first) in str(caught.value)
    assert repr(second) in str(caught.value)


def test_keys_without_a_stable_text_are_refused():
    with pytest.raises(TypeError, match="no text that is the same on every rank"):
        flatten({object(): 1.0})


trees = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False),
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(st.text("a~/01", max_size=3), children, max_size=4),
        st.builds(Pair, children, children),
    ),
    max_leaves=20,
)


@given(trees)
def test_any_tree_round_trips_and_keys_are_distinct(tree):
    keys, leaves, treedef = flatten(tree)
    assert len(keys) == len(leaves) == treedef.leaves
    assert len(set(keys)) == len(keys)
    again = unflatten(treedef, leaves)
    assert again == tree
    assert repr(again) == repr(tree)  # types and order too


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unflatten_checks_the_number_of_leaves(count):
    _, _, treedef = flatten([1.0, 2.0])
    with pytest.raises(ValueError, match=f"2 leaves, but {count}"):
        unflatten(treedef, range(count))


def test_unflatten_takes_any_iterable_and_can_be_repeated():
    _, _, treedef = flatten({"a": 1, "b": [2, 3]})
    assert unflatten(treedef, iter([4, 5, 6])) == {"a": 4, "b": [5, 6]}
    assert unflatten(treedef, (7, 8, 9)) == {"a": 7, "b": [8, 9]}


def test_result_shares_no_container_with_the_input():
    tree = {"a": [1.0], "b": {"c": 2.0}}
    again = round_trip(tree)
    again["a"].append(3.0)
    again["b"]["d"] = 4.0
    assert tree == {"a": [1.0], "b": {"c": 2.0}}


def test_cyclic_and_very_deep_trees():
    cyclic = [1.0]
    cyclic.append({"again": cyclic})
    with pytest.raises(ValueError, match="nested too deeply, or one of its containers holds itself"):
        flatten(cyclic)
    deep = 1.0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        flatten(deep)
    while isinstance(deep, list):  # taken apart by hand: the interpreter frees nested lists recursively
        deep = deep.pop()


def test_what_could_be_flattened_can_be_rebuilt_on_a_fuller_stack():
    tree = 1.0
    for _ in range(sys.getrecursionlimit() // 2):
        tree = {"x": tree}
    keys, leaves, treedef = flatten(tree)
    assert keys[0].count("/") == sys.getrecursionlimit() // 2 - 1

    def deeper(levels):
        return unflatten(treedef, leaves) if levels == 0 else deeper(levels - 1)

    again = deeper(sys.getrecursionlimit() // 2)
    while isinstance(again, dict):
        again = again["x"]
    assert again == 1.0


def test_threads():
    tree = {f"layer{i}": {"w": np.ones(2), "b": None} for i in range(50)}
    expected = flatten(tree)[0]
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(flatten(tree)[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [expected] * 8
