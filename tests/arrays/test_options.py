"""CommunicationOptions and order_check: closed sets, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import CommunicationOptions, MirroredStrategy
from aiodist._core.call import OrderCheck


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "bytes_per_pack must be 0 or more, got -1"),
        ({"bytes_per_pack": 2.5}, TypeError, "bytes_per_pack must be an int, got 2.5"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be more than 0, or None to wait, got 0"),
        ({"timeout_seconds": math.nan}, ValueError, "timeout_seconds must be more than 0"),
        ({"timeout_seconds": "3"}, TypeError, "not supported between instances of 'str' and 'int'"),
        ({"implementation": "gloo"}, ValueError, "implementation must be one of 'auto', 'ring', 'nccl', got 'gloo'"),
        ({"accumulate": 64}, ValueError, "accumulate must be one of 'native', 'float64', got 64"),
    ],
    ids=str,
)
def test_value_out_of_its_range(values: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CommunicationOptions(**values)


OPTIONS = st.builds(
    CommunicationOptions,
    bytes_per_pack=st.sampled_from([0, 1, 1 << 20]),
    timeout_seconds=st.sampled_from([None, 1, 2.5]),
    implementation=st.sampled_from(["auto", "ring", "NCCL"]),
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
    for check in ("call_site", "call_path", "signature"):
        for either in (check, OrderCheck(check)):
            assert MirroredStrategy(order_check=either).extended.order_check is OrderCheck(check)
    with pytest.raises(ValueError, match="order_check must be one of 'call_site', 'call_path', 'signature', got"):
        MirroredStrategy(order_check="callsite")
    with pytest.raises(TypeError, match="merge expects CommunicationOptions or None, got"):
        CommunicationOptions().merge({"bytes_per_pack": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cross_device_ops must be CrossDeviceOps or None"):
        MirroredStrategy(cross_device_ops="nccl")  # type: ignore[arg-type]
