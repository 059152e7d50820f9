# SPDX-License-Identifier: Apache-2.0
"""The five ways to reduce, by the names that `tf.distribute` gives them."""

import enum


class ReduceOp(enum.Enum):
    """How the values of several replicas become one.

    `ReduceOp("sum")` finds a member by its name in any case.

    Raises:
        ValueError: from `ReduceOp(value)`, for anything that names no member.
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PRODUCT = "PRODUCT"

    # Enum hashes the name in Python; identity is as good for singletons, and this hash
    # stands on the path of every small reduction.
    __hash__ = object.__hash__

    @classmethod
    def _missing_(cls, value: object) -> "ReduceOp":
        member = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if member is None:
            raise ValueError(
                f"expected a reduce op, one of {', '.join(cls.__members__)} "
                f"(ReduceOp.SUM, or the string 'SUM' in any case), got {value!r}"
            )
        return member


ReduceOp.__module__ = "aiodist_kernels"
