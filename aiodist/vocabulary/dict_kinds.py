"""Subclasses of dict: nests too, as in TensorFlow, without being registered by whoever wrote them.

optree knows dict, `OrderedDict` and `defaultdict` by their exact types. A subclass of theirs is registered when it is
first met, in our namespace alone; one that somebody has registered is a nest already, and never comes here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import optree
from optree.utils import total_order_sorted


class _Form:
    """What is left of a dict without its values. Two with the same keys are equal, in whatever order they stand."""

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


def register(leaves: Iterable[Any], namespace: str) -> bool:
    """Register the types of those leaves that are dicts; return whether there was one.

    Whoever flattened them does so again then.
    """
    found = False
    for leaf in leaves:
        if isinstance(leaf, dict):
            _register(type(leaf), namespace)
            found = True
    return found


def _register(kind: Any, namespace: str) -> None:
    def flatten(value: Any) -> tuple[list[Any], _Form, Sequence[Any]]:
        form = _Form(value)
        return [value[key] for key in form.keys], form, form.keys

    def unflatten(form: Any, children: Iterable[Any]) -> Any:
        values = dict(zip(form.keys, children, strict=True))
        try:
            return kind(*form.factory, {key: values[key] for key in form.order})
        except TypeError as error:
            error.add_note(
                f"a {kind.__qualname__} with other values is made by {kind.__qualname__}(mapping); where that is not "
                f"how it is made, register it: optree.register_pytree_node({kind.__qualname__}, …, "
                f"namespace={namespace!r})"
            )
            raise

    with suppress(ValueError):  # another thread has just done it, or the same type came twice
        optree.register_pytree_node(kind, flatten, unflatten, path_entry_type=optree.MappingEntry, namespace=namespace)
