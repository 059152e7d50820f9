"""CommunicationOptions and order_check; tests/strategy/test_bad_arguments.py has the values that they refuse."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist import CommunicationOptions, MirroredStrategy
from aiodist._core.call import OrderCheck

OPTIONS = st.builds(
    CommunicationOptions,
    bytes_per_pack=st.sampled_from([0, 1, 1 << 20]),
    timeout_seconds=st.sampled_from([None, 1, 2.5]),
    implementation=st.sampled_from(["auto", "ring", "NCCL"]),
    accumulate=st.sampled_from(["native", "float64"]),
)


@given(OPTIONS, OPTIONS)
def test_merge_overrides_with_values_that_are_not_defaults(
    first: CommunicationOptions, second: CommunicationOptions
) -> None:
    merged, default = first.merge(second), CommunicationOptions()
    assert dataclasses.astuple(default) == (0, None, "auto", "native")
    assert first.merge(None) is first
    for field in dataclasses.fields(CommunicationOptions):
        own, given, base = (getattr(options, field.name) for options in (first, second, default))
        assert getattr(merged, field.name) == (own if given == base else given)


@pytest.mark.parametrize("check", ["call_site", "call_path", "signature"])
def test_order_check_is_a_name_or_a_member(check: str) -> None:
    for either in (check, OrderCheck(check)):
        assert MirroredStrategy(order_check=either).extended.order_check is OrderCheck(check)
