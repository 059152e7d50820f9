"""Nests: tuples, lists, dicts and their kin, namedtuples, registered dataclasses, as optree knows them.

optree orders dict keys by sorting, so two dicts that were filled in another order are the same nest, and it puts a
result's keys back into the order of the nest that it came from. Types are registered with optree, globally or in the
namespace ``"aiodist"``; subclasses of dict need not be (`dict_kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import optree

from aiodist.vocabulary import dict_kinds

NAMESPACE = "aiodist"
_MOST_DIFFERENCES = 4
_MOST_CHARACTERS = 80
Structure = optree.PyTreeSpec


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest in which None is empty, as it is in a collective.

    A subclass of dict that nobody has met is a leaf here: `meet_dicts`.
    """
    leaves, structure = optree.tree_flatten(value, namespace=NAMESPACE)
    return leaves, structure


def meet_dicts(value: Any) -> bool:
    """Make nests of the subclasses of dict in a nest, and return whether there was one that nobody had met."""
    met = False
    while dict_kinds.register(flatten(value)[0], NAMESPACE):
        met = True
    return met


class _FlatDict:
    """A plain dict of leaves, by its keys: its structure, and its keys in the order of the leaves."""

    __slots__ = ("keys", "structure")

    def __init__(self, keys: tuple[Any, ...]) -> None:
        order, self.structure = flatten({key: index for index, key in enumerate(keys)})
        self.keys = tuple(keys[index] for index in order)


_flat_dicts: dict[tuple[Any, ...], _FlatDict] = {}
_MOST_FLAT_DICTS = 1024


def flatten_flat_dict(value: dict[Any, Any]) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a plain dict whose values are all leaves, as the caller has to know.

    A training step reduces the same few dicts again and again, and this takes a third of the time of `flatten`.
    """
    keys = tuple(value)
    known = _flat_dicts.get(keys)
    if known is None:
        if len(_flat_dicts) >= _MOST_FLAT_DICTS:
            _flat_dicts.clear()
        known = _flat_dicts[keys] = _FlatDict(keys)
    return [value[key] for key in known.keys], known.structure


def flatten_with_none(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest in which None is a leaf, as it is in arguments and results."""
    leaves, structure = optree.tree_flatten(value, none_is_leaf=True, namespace=NAMESPACE)
    return flatten_with_none(value) if dict_kinds.register(leaves, NAMESPACE) else (leaves, structure)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the nest of that structure with these leaves."""
    return structure.unflatten(leaves)


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return the nest with ``fn`` applied to every leaf; None is a leaf."""
    leaves, structure = flatten_with_none(value)
    return unflatten(structure, map(fn, leaves))


def text(structure: Structure) -> str:
    """Return a structure as a person reads it, with a ``*`` for each leaf, e.g. ``{'b': *, 'w': [*, *]}``."""
    shown = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return shown.removesuffix(f", namespace={NAMESPACE!r}").removesuffix(", NoneIsLeaf")


def leaf_paths(structure: Structure, root: str) -> list[str]:
    """Return the code that reaches each leaf from a variable called ``root``, e.g. ``grads['w'][0]``."""
    return [accessor.codify(root) for accessor in structure.accessors()]


def difference(a: Structure, b: Structure, root: str, here: str, there: str) -> str:
    """Say where two structures first differ, and which keys stand on one side only, in few words.

    Args:
        a: a structure.
        b: another one.
        root: what the nest is called.
        here: whose structure ``a`` is, e.g. ``replica 0``.
        there: whose ``b`` is.

    Returns:
        E.g. ``value['w'] stands on replica 1 only, value['b'][0] is (*, *) on replica 0 and * on replica 1``.
    """
    told = [*islice(_differences(a, b, root, here, there), _MOST_DIFFERENCES + 1)]
    more = ", …" if len(told) > _MOST_DIFFERENCES else ""
    return ", ".join(told[:_MOST_DIFFERENCES]) + more


def _differences(a: Structure, b: Structure, path: str, here: str, there: str) -> Iterator[str]:
    if a == b:
        return
    mine, theirs = _children(a, path), _children(b, path)
    common = [entry for entry in mine if entry in theirs]
    if a.type is not b.type or (len(mine) == len(theirs) == len(common) and all(mine[e] == theirs[e] for e in common)):
        yield f"{_brief(path)} is {_brief(text(a))} on {here} and {_brief(text(b))} on {there}"
        return
    for children, others, side in ((mine, theirs, here), (theirs, mine, there)):
        for entry in children:
            if entry not in others:
                yield f"{_brief(entry)} stands on {side} only"
    for entry in common:
        yield from _differences(mine[entry], theirs[entry], entry, here, there)


def _children(structure: Structure, path: str) -> dict[str, Structure]:
    """Return what stands directly in a nest, by the code that reaches it."""
    level = structure.one_level()
    if level is None:
        return {}
    return dict(zip(leaf_paths(level, path), structure.children(), strict=True))


def _brief(shown: str) -> str:
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 2]} …"
