"""Trees of arrays: nested containers to a flat list of leaves with stable keys, and back.

Containers are mappings, lists, tuples, named tuples and, where JAX is loaded, the node types that are
registered with it. ``None`` is a leaf of its own, so that a missing gradient keeps its place and its key.
Anything else is a leaf. Nothing here communicates, and no library is imported: JAX is looked up among the
modules that the caller has loaded.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["TreeDef", "flatten", "unflatten"]

_Rebuild = Callable[[list[Any]], Any]


@dataclass(slots=True, repr=False, eq=False)
class TreeDef:
    """Structure of a tree: how to put its leaves together again. Made by `flatten`, used by `unflatten`.

    Attributes
    ----------
    leaves : int
        Number of leaves, those that are ``None`` included.
    """

    # A program for a stack machine, children before their parent: None takes the next leaf, (count, rebuild)
    # replaces the last `count` values by one container. So rebuilding needs no recursion and cannot fail for
    # lack of stack.
    steps: list[tuple[int, _Rebuild] | None]
    leaves: int

    def __repr__(self) -> str:
        return f"TreeDef(leaves={self.leaves})"


class _Node(NamedTuple):
    texts: list[str]  # one key component for each child
    children: list[Any]
    rebuild: _Rebuild


class _Output(NamedTuple):
    keys: list[str]
    leaves: list[Any]
    steps: list[tuple[int, _Rebuild] | None]


# Types that are leaves for certain, so that they need no look at the containers. Array types are added when
# first met.
_LEAF_TYPES: set[type] = {type(None), bool, int, float, complex, str, bytes}


def flatten(tree: object, /) -> tuple[list[str], list[Any], TreeDef]:
    """Flatten a tree into its leaves, in an order that depends on keys and structure only.

    Parameters
    ----------
    tree : object
        An array, or nested mappings, lists, tuples, named tuples, ``None`` and (JAX loaded) registered nodes.

    Returns
    -------
    keys : list of str
        Path of each leaf, components joined by ``/``; ``~`` in a component is written ``~0`` and ``/`` is
        written ``~1``, so that no two leaves share a key. A tree that is one leaf has the key ``""``.
    leaves : list
        The leaves, in the same order; ``None`` stands as a leaf.
    treedef : TreeDef
        For `unflatten`.

    Raises
    ------
    ValueError
        Two keys of one mapping have the same text (``3`` and ``"3"``), or the nesting is too deep, or a
        container holds itself.
    TypeError
        A mapping key has no text that is the same in every process, or a mapping's type cannot be rebuilt.

    Examples
    --------
    >>> keys, leaves, treedef = flatten({"w": 1.0, "b": [2.0, None]})
    >>> keys, leaves
    (['b/0', 'b/1', 'w'], [2.0, None, 1.0])
    >>> unflatten(treedef, leaves)
    {'w': 1.0, 'b': [2.0, None]}
    """
    out = _Output([], [], [])
    try:
        _walk(tree, "", "", out)
    except RecursionError:
        message = "the tree is nested too deeply, or one of its containers holds itself"
        raise ValueError(message) from None
    return out.keys, out.leaves, TreeDef(out.steps, len(out.leaves))


def unflatten(treedef: TreeDef, leaves: Iterable[Any], /) -> Any:
    """Build the tree again, with other leaves in the old places.

    Parameters
    ----------
    treedef : TreeDef
        Structure from `flatten`.
    leaves : iterable
        One object for each leaf, in the order of `flatten`; put back as they are, ``None`` included.

    Returns
    -------
    object
        Containers of the same types, mappings in their owner's own order.

    Raises
    ------
    ValueError
        The number of leaves is not that of the structure.
    """
    values = list(leaves)
    if len(values) != treedef.leaves:
        message = f"the tree has {treedef.leaves} leaves, but {len(values)} were given"
        raise ValueError(message)
    following = iter(values)
    stack: list[Any] = []
    for step in treedef.steps:
        if step is None:
            stack.append(next(following))
            continue
        count, rebuild = step
        first = len(stack) - count
        children = stack[first:]
        del stack[first:]
        stack.append(rebuild(children))
    return stack[0]


def _walk(tree: Any, key: str, prefix: str, out: _Output) -> None:
    """Append the leaves below `tree`; `prefix` is what the keys of its children begin with."""
    node = None if type(tree) in _LEAF_TYPES else _open(tree)
    if node is None:
        out.keys.append(key)
        out.leaves.append(tree)
        out.steps.append(None)
        return
    for text, child in zip(node.texts, node.children, strict=True):
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")  # noqa: PLW2901
        name = prefix + text
        if type(child) in _LEAF_TYPES:  # as above, without a call: most children are arrays
            out.keys.append(name)
            out.leaves.append(child)
            out.steps.append(None)
        else:
            _walk(child, name, name + "/", out)
    out.steps.append((len(node.children), node.rebuild))


def _open(tree: Any) -> _Node | None:
    """Take one level of a container apart; None for a leaf."""
    kind = type(tree)
    if kind is dict or kind is OrderedDict or kind is defaultdict:
        return _open_mapping(tree)
    if kind is list or kind is tuple:
        return _Node([str(i) for i in range(len(tree))], list(tree), kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        return _Node(list(tree._fields), list(tree), kind._make)
    registered = _open_registered(tree)
    if registered is not None:
        return registered
    if issubclass(kind, Mapping):
        return _open_mapping(tree)
    if hasattr(kind, "__dlpack__") or hasattr(kind, "__array_interface__"):
        _LEAF_TYPES.add(kind)
    return None


def _open_mapping(mapping: Mapping[Any, Any]) -> _Node:
    if set(map(type, mapping)) == {str}:
        names = sorted(mapping)
        return _Node(names, [mapping[name] for name in names], _mapping_builder(mapping, names))
    pairs = sorted(((_text(key), key) for key in mapping), key=operator.itemgetter(0))
    texts = [text for text, _ in pairs]
    keys = [key for _, key in pairs]
    _require_distinct(texts, keys)
    return _Node(texts, [mapping[key] for key in keys], _mapping_builder(mapping, keys))


def _mapping_builder(mapping: Mapping[Any, Any], keys: list[Any]) -> _Rebuild:
    """Return a function from children, in the order of `keys`, to a mapping of the type and order given."""
    own_order = list(mapping)
    construct = _constructor(mapping)

    if own_order == keys:
        return lambda children: construct(dict(zip(keys, children, strict=True)))

    def rebuild(children: list[Any]) -> Any:
        by_key = dict(zip(keys, children, strict=True))
        return construct({key: by_key[key] for key in own_order})

    return rebuild


def _constructor(mapping: Mapping[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    kind: Any = type(mapping)
    if kind is dict:
        return _unchanged
    if kind is OrderedDict:
        return OrderedDict
    if kind is defaultdict:
        factory = mapping.default_factory  # type: ignore[attr-defined]
        return lambda items: kind(factory, items)
    # Types of others are tried before anything is sent: a constructor that fails on the way back would be too
    # late.
    try:
        again = kind(dict(mapping))
        same = type(again) is kind and list(again) == list(mapping)
    except Exception as error:  # whatever it raises, the type cannot be rebuilt
        message = f"a mapping of type {kind.__qualname__} cannot be built from a dict ({error}): pass dict(x)"
        raise TypeError(message) from error
    if not same:
        message = f"a mapping of type {kind.__qualname__} built from a dict has other keys: pass dict(x)"
        raise TypeError(message)
    return kind  # type: ignore[no-any-return]


def _unchanged(items: dict[Any, Any]) -> dict[Any, Any]:
    return items


def _text(key: Hashable) -> str:
    """Return the key component for a mapping key; the same in every process."""
    if isinstance(key, str):
        return str.__str__(key)
    if hasattr(type(key), "__index__") and not isinstance(key, bool):
        return str(operator.index(key))  # type: ignore[arg-type]
    if type(key).__repr__ is object.__repr__:
        message = (
            f"the mapping key {key!r} has no text that is the same on every rank: use a string or an integer"
        )
        raise TypeError(message)
    return repr(key)


def _require_distinct(texts: list[str], keys: list[Any]) -> None:
    if len(set(texts)) == len(texts):
        return
    first: dict[str, Any] = {}
    for text, key in zip(texts, keys, strict=True):
        if text in first:
            message = f"the keys {first[text]!r} and {key!r} of one container have the same text {text!r}"
            raise ValueError(message)
        first[text] = key


def _open_registered(tree: Any) -> _Node | None:
    """Take apart one level of a node whose type is registered with JAX; None for any other object."""
    tree_util = getattr(sys.modules.get("jax"), "tree_util", None)
    if tree_util is None or tree_util.all_leaves((tree,)):
        return None
    root = True

    def is_leaf(_: object) -> bool:  # asked about the root first: children stay whole, None among them
        nonlocal root
        inside, root = not root, False
        return inside

    paths, treedef = tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    entries = [path[0] for path, _ in paths]
    children = [child for _, child in paths]
    texts = [_entry_text(entry) for entry in entries]
    _require_distinct(texts, entries)
    if not all(isinstance(entry, tree_util.DictKey) for entry in entries):
        return _Node(texts, children, treedef.unflatten)
    # A mapping may flatten in the order of insertion, which may differ between ranks.
    order = sorted(range(len(texts)), key=texts.__getitem__)
    back = sorted(range(len(order)), key=order.__getitem__)
    return _Node(
        [texts[i] for i in order],
        [children[i] for i in order],
        lambda values: treedef.unflatten([values[i] for i in back]),
    )


def _entry_text(entry: Any) -> str:
    """Return the text of one component of a JAX key path."""
    for name in ("key", "idx", "name"):  # DictKey and FlattenedIndexKey, SequenceKey, GetAttrKey
        if hasattr(entry, name):
            return _text(getattr(entry, name))
    return str(entry)
