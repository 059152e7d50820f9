"""When and how a variable's components are combined."""

from __future__ import annotations

import enum
from typing import Any, NoReturn

from aiodist_kernels import ReduceOp


class _NamedChoice(enum.StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Any:
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        return found if found is not None else cls._refuse(value)

    @classmethod
    def _refuse(cls, value: object) -> NoReturn:
        known = ", ".join(repr(str(member)) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {known}, got {value!r}")


class VariableSynchronization(_NamedChoice):
    """When the components of a variable are combined. Strings of any case are accepted for members.

    Attributes:
        AUTO: as ON_WRITE.
        NONE: never; not allowed for a strategy's variables, as in TensorFlow.
        ON_WRITE: at every assignment, so that all components are equal: a mirrored variable.
        ON_READ: when it is read outside of replicas; each replica assigns to its own component.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class VariableAggregation(_NamedChoice):
    """How replicas' values or components are combined. Strings of any case are accepted for members.

    Attributes:
        NONE: not at all; values assigned to a mirrored variable must be equal.
        SUM: the sum.
        MEAN: the mean.
        ONLY_FIRST_REPLICA: replica 0's value.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @property
    def reduce_op(self) -> ReduceOp | None:
        """The corresponding reduction; None for NONE and ONLY_FIRST_REPLICA."""
        return _REDUCE_OPS.get(self)


_REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}

for _class in (VariableSynchronization, VariableAggregation):
    _class.__module__ = "aiodist"
del _class
