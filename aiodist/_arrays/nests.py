"""Nests: tuples, lists, dicts and their kin, namedtuples and registered dataclasses, as optree knows them.

optree sorts dict keys, so two dicts filled in different orders are the same nest, and a result's keys come back in the
order of the nest that it came from. Types are registered with optree, globally or in the namespace ``"aiodist"``.

Subclasses of dict are nests too, as in TensorFlow, without being registered by their author. optree knows dict,
`OrderedDict` and `defaultdict` by their exact types; a subclass of theirs is registered when it is first met, in our
namespace alone. One that somebody has registered is a nest already and never gets here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree
from optree.utils import total_order_sorted

NAMESPACE = "aiodist"
_MOST_DIFFERENCES = 4
_MOST_CHARACTERS = 80
_MOST_TEMPLATE_LEAVES = 512
Structure = optree.PyTreeSpec
Build: TypeAlias = Callable[[Iterable[Any]], Any]
"""Makes a nest of leaves."""


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest where None is empty, as in a collective; see `register_dicts`."""
    leaves, structure = optree.tree_flatten(value, namespace=NAMESPACE)
    return leaves, structure


def flatten_with_none(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves and the structure of a nest in which None is a leaf, as it is in arguments and results."""
    leaves, structure = optree.tree_flatten(value, none_is_leaf=True, namespace=NAMESPACE)
    for leaf in leaves:
        if isinstance(leaf, dict):
            _register_dicts_in(leaves)
            return flatten_with_none(value)
    return leaves, structure


def register_dicts(value: Any) -> bool:
    """Register the subclasses of dict in a nest as nests; return whether there was a new one."""
    found = False
    while _register_dicts_in(flatten(value)[0]):
        found = True
    return found


def builder(structure: Structure | None) -> Build | None:
    """Return what makes nests of that structure; None where there is none."""
    return None if structure is None else structure.unflatten


def text(structure: Structure) -> str:
    """Return a structure as a person reads it, with a ``*`` for each leaf, e.g. ``{'b': *, 'w': [*, *]}``."""
    shown = str(structure).removeprefix("PyTreeSpec(").removesuffix(")")
    return shown.removesuffix(f", namespace={NAMESPACE!r}").removesuffix(", NoneIsLeaf")


def leaf_paths(structure: Structure, root: str) -> list[str]:
    """Return the code that reaches each leaf from a variable called ``root``, e.g. ``grads['w'][0]``."""
    return [accessor.codify(root) for accessor in structure.accessors()]


def difference(a: Structure, b: Structure, root: str, here: str, there: str) -> str:
    """Say briefly where structures first differ, ``a`` of ``here`` and ``b`` of ``there``, and which keys one lacks.

    E.g. ``value['w'] is on replica 1 only, value['b'][0] is (*, *) on replica 0 and * on replica 1``, where ``root`` is
    "value", ``here`` is "replica 0" and ``there`` is "replica 1".
    """
    found = [*islice(_differences(a, b, root, here, there), _MOST_DIFFERENCES + 1)]
    more = ", …" if len(found) > _MOST_DIFFERENCES else ""
    return ", ".join(found[:_MOST_DIFFERENCES]) + more


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
                yield f"{_brief(entry)} is on {side} only"
    for entry in common:
        yield from _differences(mine[entry], theirs[entry], entry, here, there)


def _children(structure: Structure, path: str) -> dict[str, Structure]:
    """Return the direct children of a nest, by the code that reaches them."""
    level = structure.one_level()
    if level is None:
        return {}
    return dict(zip(leaf_paths(level, path), structure.children(), strict=True))


def _brief(shown: str) -> str:
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[: _MOST_CHARACTERS - 2]} …"


class _Form:
    """A dict without its values. Two forms with the same keys are equal, whatever their order."""

    __slots__ = ("factory", "keys", "order")

    def __init__(self, value: dict[Any, Any]) -> None:
        self.order = tuple(value)
        self.keys = tuple(total_order_sorted(self.order))
        self.factory = (value.default_factory,) if isinstance(value, defaultdict) else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and (self.keys, self.factory) == (other.keys, other.factory)

    def __hash__(self) -> int:
        return hash((self.keys, self.factory))

    def __repr__(self) -> str:
        return repr(list(self.keys))


def _register_dicts_in(leaves: Iterable[Any]) -> bool:
    """Register the types of those leaves that are dicts; return whether there were any: then flatten again."""
    kinds = {type(leaf) for leaf in leaves if isinstance(leaf, dict)}
    for kind in kinds:
        _register(kind)
    return bool(kinds)


def _register(kind: Any) -> None:
    def flatten_dict(value: Any) -> tuple[list[Any], _Form, Sequence[Any]]:
        form = _Form(value)
        return [value[key] for key in form.keys], form, form.keys

    def unflatten_dict(form: Any, children: Iterable[Any]) -> Any:
        values = dict(zip(form.keys, children, strict=True))
        try:
            return kind(*form.factory, {key: values[key] for key in form.order})
        except TypeError as error:
            error.add_note(
                f"a {kind.__qualname__} with other values is made by {kind.__qualname__}(mapping); where that is not "
                f"how it is made, register it: optree.register_pytree_node({kind.__qualname__}, …, "
                f"namespace={NAMESPACE!r})"
            )
            raise

    with suppress(ValueError):  # another thread has just registered it
        optree.register_pytree_node(
            kind, flatten_dict, unflatten_dict, path_entry_type=optree.MappingEntry, namespace=NAMESPACE
        )


class Template(NamedTuple):
    """Code for nests of NumPy arrays in plain dicts, lists and tuples that are like one in everything but the numbers.

    A training step reduces the same few nests again and again, and this takes a tenth of the time of optree.

    Attributes:
        match: returns the leaves of a nest in optree's order; None where it differs in a type, a key, the order of
            keys, a shape or a dtype.
        build: makes such a nest of leaves in that order.
    """

    match: Callable[[Any], list[Any] | None]
    build: Build


def template(nest: Any) -> Template | None:
    """Return the code for nests like this one; None where it has other containers, or very many leaves.

    Every leaf has to be a NumPy array.
    """
    writer = _Writer()
    made = writer.write("nest", nest)
    if made is None or not writer.leaves or len(writer.leaves) > _MOST_TEMPLATE_LEAVES:
        return None
    names = dict(writer.names)
    exec(f"def build({', '.join(writer.leaves)}): return {made}", names)  # noqa: S102  (only what stands here)
    order = flatten(names["build"](*range(len(writer.leaves))))[0]
    leaves = ", ".join(writer.leaves[index] for index in order)
    lines = ["def match(nest):", *writer.lines, f"    return [{leaves}]"]
    exec("\n".join([*lines, f"def build(leaves): {leaves}, = leaves; return {made}"]), names)  # noqa: S102
    return Template(names["match"], names["build"])


class _Writer:
    """Writes the code that tells whether a nest is like the first, with a variable for each of its parts."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.leaves: list[str] = []
        self.names: dict[str, Any] = {"ndarray": np.ndarray}

    def write(self, variable: str, part: Any) -> str | None:
        """Write what takes a part of the nest apart; return the code that makes one, None where there is none."""
        kind = type(part)
        if part is None:
            self._unless(f"{variable} is None")
            return "None"
        if kind is np.ndarray:
            shape, dtype = self._name(part.shape), self._name(part.dtype)
            self._unless(f"type({variable}) is ndarray and {variable}.dtype is {dtype} and {variable}.shape == {shape}")
            self.leaves.append(variable)
            return variable
        if kind not in (dict, list, tuple):
            return None
        self._unless(f"type({variable}) is {kind.__name__} and len({variable}) == {len(part)}")
        inner = [f"{variable}_{index}" for index in range(len(part))]
        if kind is dict:
            self._unless(f"[*{variable}] == {self._name([*part])}")
            if not all(type(key) is str for key in part):  # True equals 1
                self._unless(f"[*map(type, {variable})] == {self._name([*map(type, part)])}")
        if inner:
            self.lines.append(f"    {', '.join(inner)}, = {variable}{'.values()' if kind is dict else ''}")
        made = [self.write(*each) for each in zip(inner, part.values() if kind is dict else part, strict=True)]
        if None in made:
            return None
        if kind is dict:
            items = zip(map(self._name, part), made, strict=True)
            return f"{{{', '.join(f'{key}: {value}' for key, value in items)}}}"
        return f"[{', '.join(map(str, made))}]" if kind is list else f"({''.join(f'{each}, ' for each in made)})"

    def _unless(self, condition: str) -> None:
        self.lines.append(f"    if not ({condition}): return None")

    def _name(self, thing: Any) -> str:
        name = f"_{len(self.names)}"
        self.names[name] = thing
        return name
