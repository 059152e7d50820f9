"""Subclasses of dict are nests without being registered."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import optree
import pytest

from aiodist._arrays import nests


class Fields(dict[str, Any]):
    pass


class Ordered(OrderedDict[str, Any]):
    pass


class Grouped(defaultdict[str, Any]):
    pass


@pytest.mark.parametrize(
    "nest", [Fields(z=1, a=[2]), Ordered(z=1, a=[2]), Grouped(list, z=1, a=[2]), Fields()], ids=repr
)
def test_nest_comes_back_as_what_it_was(nest: Any) -> None:
    again = nests.map_leaves(lambda leaf: leaf, {"deep": nest})["deep"]
    assert type(again) is type(nest)
    assert again == nest
    assert list(again) == list(nest)
    assert getattr(again, "default_factory", None) is getattr(nest, "default_factory", None)


def test_order_of_keys_does_not_matter_and_type_does() -> None:
    structures = [
        nests.flatten_with_none(n)[1] for n in (Fields(a=1, b=2), Fields(b=1, a=2), {"a": 1, "b": 2}, Fields(a=1))
    ]
    assert structures[0] == structures[1]
    assert hash(structures[0]) == hash(structures[1])
    assert structures[0] not in structures[2:]
    assert nests.flatten_with_none(Grouped(int))[1] != nests.flatten_with_none(Grouped(list))[1]


def test_paths_are_code() -> None:
    _, structure = nests.flatten_with_none(Fields(a=[1, 2]))
    assert nests.leaf_paths(structure, "grads") == ["grads['a'][0]", "grads['a'][1]"]


def test_dict_in_a_collective_is_met_when_it_is_described() -> None:
    class Fresh(dict[str, Any]):
        pass

    value = [Fresh(a=1)]
    assert nests.flatten(value)[0] == value
    assert nests.register_dicts(value)
    assert nests.flatten(value)[0] == [1]
    assert not nests.register_dicts(value)


def test_registration_of_the_users_own_holds() -> None:
    class Known(dict[str, Any]):
        pass

    def parts(value: Any) -> Any:
        return [value["a"]], None

    def whole(_: Any, leaves: Any) -> Known:
        return Known(a=next(iter(leaves)))

    optree.register_pytree_node(Known, parts, whole, namespace="aiodist")
    assert nests.flatten_with_none(Known(a=1, b=2))[0] == [1]


def test_dict_that_is_made_otherwise_says_what_to_do() -> None:
    class Sized(dict[str, Any]):
        def __init__(self, *, size: int) -> None:
            super().__init__(size=size)

    with pytest.raises(TypeError) as caught:
        nests.map_leaves(lambda leaf: leaf, Sized(size=1))
    assert "optree.register_pytree_node" in caught.value.__notes__[0]
