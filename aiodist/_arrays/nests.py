"""Nests: tuples, lists, dicts and their subclasses, namedtuples and registered dataclasses, by optree.

optree sorts dict keys, so two dicts filled in different orders are the same nest, and a result has the key order of its
own input. Types are registered with optree, globally or in the namespace ``"aiodist"``.

Subclasses of dict are nests too, as in TensorFlow, without being registered by their author: they are registered when
they are first met, in our namespace only. They are rebuilt by a call with a mapping, after the factory for a
`defaultdict`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from aiodist._core.call import LEAF
from aiodist._core.text import shortened

NAMESPACE = "aiodist"
_MOST_CHARACTERS = 80
_MOST_TEMPLATE_LEAVES = 512
Structure = optree.PyTreeSpec
Build: TypeAlias = Callable[[Iterable[Any]], Any]  # makes a nest of leaves


def flatten(value: Any, *, none_is_leaf: bool = False) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest where None is empty, as in a collective."""
    leaves, structure = optree.tree_flatten(value, none_is_leaf=none_is_leaf, namespace=NAMESPACE)
    unregistered = [kind for kind in set(map(type, leaves)) if issubclass(kind, dict)]
    for kind in unregistered:
        _register(kind)
    return flatten(value, none_is_leaf=none_is_leaf) if unregistered else (leaves, structure)


def flatten_with_none(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest in which None is a leaf, as it is in arguments and results."""
    return flatten(value, none_is_leaf=True)


def builder(structure: Structure | None) -> Build | None:
    """Return a function that makes nests of a structure; None without a structure."""
    return None if structure is None else structure.unflatten


def without_factories(structure: Structure) -> Structure:
    """Return a structure for comparisons: a `defaultdict`'s factory may be another function on each replica."""
    return structure.transform(_without_factory)


def _without_factory(node: Structure) -> Structure:
    if node.type is not defaultdict:
        return node
    bare: Any = defaultdict(None, dict.fromkeys(node.entries(), 0))
    return optree.tree_structure(bare, none_is_leaf=node.none_is_leaf, namespace=NAMESPACE)


def text(structure: Structure) -> str:
    """Return a structure as text, with a ``*`` for each leaf, e.g. ``{'b': *, 'w': [*, *]}``."""
    shown = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return shown.removesuffix(f", namespace={NAMESPACE!r}").removesuffix(", NoneIsLeaf")


class _Leaf:
    """A placeholder for a leaf, whose repr is `LEAF`."""

    def __repr__(self) -> str:
        return LEAF


@lru_cache(maxsize=1024)
def skeleton(structure: Any) -> str:
    """Return a structure as such a nest's repr, with `LEAF` for each leaf; dicts have optree's order of keys."""
    structure = without_factories(structure)
    leaves = iter([_Leaf() for _ in range(structure.num_leaves)])
    shown = repr(_in_order_of_keys(structure, leaves))
    # The repr of a registered class may lack its leaves, and have an address, which differs from worker to worker.
    return shown if shown.count(LEAF) == structure.num_leaves else text(structure).replace("*", LEAF)


def _in_order_of_keys(structure: Any, leaves: Any) -> Any:
    if structure.is_leaf():
        return next(leaves)
    children = [_in_order_of_keys(child, leaves) for child in structure.children()]
    if structure.type is dict:
        return dict(zip(structure.entries(), children, strict=True))
    return structure.one_level().unflatten(children)


def leaf_paths(structure: Structure, root: str) -> list[str]:
    """Return the code that reaches each leaf from a variable called ``root``, e.g. ``grads['w'][0]``."""
    return [accessor.codify(root) for accessor in structure.accessors()]


def difference(a: Structure, b: Structure, path: str, here: str, there: str) -> str:
    """Describe the first difference of structures, ``a`` of ``here`` and ``b`` of ``there``.

    For example ``value['w'] is on replica 1 only``, or ``value['b'][0] is (*, *) on replica 0 and * on replica 1``,
    where ``path`` is "value", ``here`` is "replica 0" and ``there`` is "replica 1".
    """
    if a.type is b.type:
        mine, theirs = _children(a, path), _children(b, path)
        for child in [*mine, *theirs]:
            if child not in mine or child not in theirs:
                return f"{shortened(child, _MOST_CHARACTERS)} is on {here if child in mine else there} only"
            if mine[child] != theirs[child]:
                return difference(mine[child], theirs[child], child, here, there)
    one, other = (shortened(text(structure), _MOST_CHARACTERS) for structure in (a, b))
    return f"{shortened(path, _MOST_CHARACTERS)} is {one} on {here} and {other} on {there}"


def _children(structure: Structure, path: str) -> dict[str, Structure]:
    """Return the children of a nest by the code that reaches them."""
    level = structure.one_level()
    if level is None:
        return {}
    return dict(zip(leaf_paths(level, path), structure.children(), strict=True))


class _SameNest(optree.PyTreeEntry):
    """The step on a path from a subclass of dict to the plain dict in it, which is not shown."""

    def codify(self, node: str = "") -> str:
        return node


@dataclass(frozen=True)
class _Factory:
    """A `defaultdict`'s factory, which is not compared: it may be another function on each replica."""

    arguments: tuple[Any, ...] = field(compare=False)

    def __repr__(self) -> str:  # in texts about differing nests
        return "dict"


def _register(kind: Any) -> None:
    """Register a subclass of dict: its only child is a plain dict, and its metadata a `defaultdict`'s factory."""

    def flatten_dict(value: Any) -> tuple[list[Any], _Factory, list[str]]:
        factory = (value.default_factory,) if isinstance(value, defaultdict) else ()
        return [{key: value[key] for key in value}], _Factory(factory), [""]  # through its own `__getitem__`

    def unflatten_dict(factory: Any, children: Iterable[Any]) -> Any:
        try:
            return kind(*factory.arguments, *children)
        except Exception as error:
            error.add_note(
                f"aiodist makes a {kind.__qualname__} by calling the class with a mapping; if that is not possible, "
                f"register the class with optree in the namespace {NAMESPACE!r}"
            )
            raise

    with suppress(ValueError):  # another thread has registered it
        optree.register_pytree_node(kind, flatten_dict, unflatten_dict, path_entry_type=_SameNest, namespace=NAMESPACE)


class Template(NamedTuple):
    """Code for nests of NumPy arrays in plain dicts, lists and tuples that equal one in everything but the numbers.

    A training step reduces the same few nests again and again, and this takes a tenth of optree's time.
    """

    match: Callable[[Any], list[Any] | None]  # returns a nest's leaves in optree's order; None if it differs
    build: Build  # makes a nest from leaves in that order


def template(nest: Any) -> Template | None:
    """Return the code for nests like this one; None if it has other containers or leaves, or very many leaves."""
    writer = _Writer()
    made = writer.write("nest", nest)
    if made is None or not writer.leaves or len(writer.leaves) > _MOST_TEMPLATE_LEAVES:
        return None
    leaves, names = ", ".join(writer.leaves), writer.names
    match = ["def match(nest):", *writer.lines, f"    return [{leaves}]"]
    build = f"def build(leaves): {leaves}, = leaves; return {made}"
    exec("\n".join([*match, build]), names)  # noqa: S102  (names and reprs of keys, which are strings)
    return Template(names["match"], names["build"])


class _Writer:
    """Writes the code that compares nests with a first one, with a variable for each part."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.leaves: list[str] = []
        self.names: dict[str, Any] = {"ndarray": np.ndarray}

    def write(self, variable: str, part: Any) -> str | None:
        """Write the code that takes a part of the nest apart; return the code that builds it, None if there is none."""
        kind = type(part)
        if part is None:
            self._unless(f"{variable} is None")
            return "None"
        if kind is np.ndarray:
            shape, dtype = self._name(part.shape), self._name(part.dtype)
            self._unless(f"type({variable}) is ndarray and {variable}.dtype is {dtype} and {variable}.shape == {shape}")
            self.leaves.append(variable)
            return variable
        if kind not in (dict, list, tuple) or (kind is dict and set(map(type, part)) - {str}):  # because 1 equals True
            return None
        alike = f"(*{variable},) == {(*part,)!r}" if kind is dict else f"len({variable}) == {len(part)}"
        self._unless(f"type({variable}) is {kind.__name__} and {alike}")
        inner = [f"{variable}_{index}" for index in range(len(part))]
        if inner:
            self.lines.append(f"    {', '.join(inner)}, = {variable}{'.values()' if kind is dict else ''}")
        if kind is dict:
            variables = dict(zip(part, inner, strict=True))
            by_key = {key: self.write(variables[key], part[key]) for key in sorted(part)}  # in optree's order
            made = [by_key[key] for key in part]
        else:
            made = [self.write(*each) for each in zip(inner, part, strict=True)]
        if None in made:
            return None
        if kind is dict:
            return f"{{{', '.join(f'{key!r}: {value}' for key, value in zip(part, made, strict=True))}}}"
        return f"[{', '.join(map(str, made))}]" if kind is list else f"({''.join(f'{each}, ' for each in made)})"

    def _unless(self, condition: str) -> None:
        self.lines.append(f"    if not ({condition}): return None")

    def _name(self, thing: Any) -> str:
        name = f"_{len(self.names)}"
        self.names[name] = thing
        return name
