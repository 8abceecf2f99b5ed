"""Trees with JAX loaded: its arrays, the node types that are registered with it, and keys without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple

import pytest

from gccomm.trees import flatten, unflatten

jax = pytest.importorskip("jax")

Pair = namedtuple("Pair", ["w", "b"])


def test_jax_arrays_are_leaves():
    x = jax.numpy.ones(3)
    keys, leaves, _ = flatten({"a": x, "b": [x]})
    assert keys == ["a", "b/0"]
    assert all(leaf is x for leaf in leaves)


class Layer:
    """A node type of a user's own."""

    def __init__(self, w, b, name):
        self.w, self.b, self.name = w, b, name


class Box:
    """A node type without named keys."""

    def __init__(self, *items):
        self.items = items


class Table:
    """A mapping-like node that flattens in order of insertion."""

    def __init__(self, **items):
        self.items = items


@pytest.fixture(scope="module")
def registered():
    tree_util = jax.tree_util
    named = tree_util.GetAttrKey
    tree_util.register_pytree_with_keys(
        Layer, lambda x: (((named("w"), x.w), (named("b"), x.b)), x.name), lambda name, c: Layer(*c, name)
    )
    tree_util.register_pytree_node(Box, lambda x: (x.items, None), lambda _, c: Box(*c))
    tree_util.register_pytree_with_keys(
        Table,
        lambda x: ([(tree_util.DictKey(k), v) for k, v in x.items.items()], tuple(x.items)),
        lambda names, c: Table(**dict(zip(names, c, strict=True))),
    )


@pytest.mark.usefixtures("registered")
def test_registered_nodes_with_keys():
    keys, leaves, treedef = flatten(
        {"net": [Layer(1.0, None, "first"), Layer(Layer(2.0, 3.0, "in"), 4.0, "out")]}
    )
    assert keys == ["net/0/w", "net/0/b", "net/1/w/w", "net/1/w/b", "net/1/b"]
    assert leaves == [1.0, None, 2.0, 3.0, 4.0]
    again = unflatten(treedef, [5, 6, 7, 8, 9])["net"]
    assert (again[0].w, again[0].b, again[0].name) == (5, 6, "first")
    assert (again[1].w.b, again[1].b, again[1].name) == (8, 9, "out")


@pytest.mark.usefixtures("registered")
def test_registered_nodes_without_keys():
    keys, leaves, treedef = flatten(Box(1.0, Box(), None, {"x/y": 2.0}))
    assert keys == ["0", "2", "3/x~1y"]
    assert leaves == [1.0, None, 2.0]
    again = unflatten(treedef, [3, 4, 5])
    assert (again.items[0], type(again.items[1]), again.items[2:]) == (3, Box, (4, {"x/y": 5}))


@pytest.mark.usefixtures("registered")
def test_registered_mappings_are_sorted_too():
    keys, leaves, treedef = flatten(Table(c=1, a=2, b=3))
    assert (keys, leaves) == (["a", "b", "c"], [2, 3, 1])
    assert list(unflatten(treedef, [20, 30, 10]).items.items()) == [("c", 10), ("a", 20), ("b", 30)]


@pytest.mark.usefixtures("registered")
def test_registered_node_that_holds_itself():
    box = Box()
    box.items = (box, 1.0)
    with pytest.raises(ValueError, match="holds itself"):
        flatten(box)
    box.items = ()


def test_same_leaves_as_jax_for_its_own_containers():
    tree = {
        "b": [1.0, (2.0, 3.0)],
        "a": Pair(4.0, OrderedDict(z=5.0, y=6.0)),
        "c": defaultdict(list, {"x": 7.0}),
    }
    ours = dict(zip(*flatten(tree)[:2], strict=True))
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    theirs = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
    assert ours == theirs


WITHOUT_JAX = """
import json, sys
from gccomm.trees import flatten
class Box: pass
keys = flatten({"b": [1.0, None], "a": {3: 2.0}, "box": Box()})[0]
print(json.dumps([keys, "jax" in sys.modules]))
"""


def test_keys_do_not_hang_on_whether_jax_is_loaded():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_JAX],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    keys, loaded = json.loads(done.stdout)
    assert not loaded
    assert (
        keys == flatten({"b": [1.0, None], "a": {3: 2.0}, "box": object()})[0] == ["a/3", "b/0", "b/1", "box"]
    )
