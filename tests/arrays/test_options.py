"""CommunicationOptions and order_check: closed sets, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import CommunicationOptions, MirroredStrategy
from aiodist._core.call import OrderCheck

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"bytes_per_pack": -1}, ValueError, "bytes_per_pack must be 0 or more, got -1"),
    ({"bytes_per_pack": 1.5}, TypeError, "bytes_per_pack must be an int, got 1.5"),
    ({"bytes_per_pack": True}, TypeError, "bytes_per_pack must be an int, got True"),
    ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be more than 0, or None to wait, got 0"),
    ({"timeout_seconds": math.nan}, ValueError, "timeout_seconds must be more than 0"),
    ({"timeout_seconds": "3"}, TypeError, "timeout_seconds must be a number of seconds or None, got '3'"),
    ({"implementation": "gloo"}, ValueError, "implementation must be one of 'auto', 'ring', 'nccl', got 'gloo'"),
    ({"implementation": None}, TypeError, "implementation must be a string, one of 'auto'"),
    ({"accumulate": "float32"}, ValueError, "accumulate must be one of 'native', 'float64', got 'float32'"),
    ({"accumulate": 64}, TypeError, "accumulate must be a string"),
]


@pytest.mark.parametrize(("values", "error", "text"), BAD, ids=[str(values) for values, *_ in BAD])
def test_value_out_of_its_range(values: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        CommunicationOptions(**values)
    assert type(caught.value) is error


def test_options_are_values() -> None:
    options = CommunicationOptions(bytes_per_pack=3, timeout_seconds=math.inf)
    assert {options} == {CommunicationOptions(3, math.inf)}
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.bytes_per_pack = 4  # type: ignore[misc]


OPTIONS = st.builds(
    CommunicationOptions,
    bytes_per_pack=st.sampled_from([0, 1, 1 << 20]),
    timeout_seconds=st.sampled_from([None, 1, 2.5]),
    implementation=st.sampled_from(["auto", "ring", "nccl"]),
    accumulate=st.sampled_from(["native", "float64"]),
)


@given(OPTIONS, OPTIONS)
def test_merge_puts_what_is_not_default_over_the_rest(
    first: CommunicationOptions, second: CommunicationOptions
) -> None:
    merged, default = first.merge(second), CommunicationOptions()
    assert dataclasses.astuple(default) == (0, None, "auto", "native")
    assert first.merge(None) is first
    for field in dataclasses.fields(CommunicationOptions):
        own, given, base = (getattr(options, field.name) for options in (first, second, default))
        assert getattr(merged, field.name) == (own if given == base else given)


def test_settings_of_a_strategy() -> None:
    assert CommunicationOptions(implementation="Nccl").implementation == "nccl"
    for check in ("call_site", "call_path", "signature"):
        for either in (check, OrderCheck(check)):
            assert MirroredStrategy(order_check=either).extended.order_check is OrderCheck(check)
    wrong: Any
    for wrong in ("callsite", "", None, 3):
        with pytest.raises(ValueError, match="order_check must be one of 'call_site', 'call_path', 'signature', got"):
            MirroredStrategy(order_check=wrong)
    with pytest.raises(TypeError, match="merge expects CommunicationOptions or None, got"):
        CommunicationOptions().merge({"bytes_per_pack": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="communication_options must be CommunicationOptions or None, got 3"):
        MirroredStrategy(communication_options=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cross_device_ops must be CrossDeviceOps or None"):
        MirroredStrategy(cross_device_ops="nccl")  # type: ignore[arg-type]
