"""What stands behind a strategy: its devices and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiodist.collective.group import SyncGroup
from aiodist.vocabulary.devices import resolve
from aiodist.vocabulary.options import CommunicationOptions, OrderCheck


@dataclass(frozen=True)
class StrategyExtended:
    """The replicas of a strategy, and how their collectives are carried out and checked.

    Args:
        devices: their devices, one each; see `MirroredStrategy`.
        communication_options: the options of every collective, which a call's own go over.
        order_check: what call sites are compared by.
    """

    devices: tuple[str, ...]
    communication_options: CommunicationOptions = field(default_factory=CommunicationOptions)
    order_check: OrderCheck = OrderCheck.CALL_SITE

    @classmethod
    def on(
        cls, devices: Sequence[str] | None, options: CommunicationOptions | None, order_check: str
    ) -> StrategyExtended:
        """Return the extended of a strategy whose arguments come from a user.

        Raises:
            TypeError, ValueError, DeviceNotFoundError: as `MirroredStrategy`.
        """
        if options is not None and not isinstance(options, CommunicationOptions):
            raise TypeError(f"communication_options must be CommunicationOptions or None, got {options!r}")
        return cls(resolve(devices), options or CommunicationOptions(), OrderCheck.parse(order_check))

    def new_group(self, options: CommunicationOptions | None = None) -> SyncGroup:
        """Return a sync group for one run."""
        return SyncGroup(self.devices, self.order_check, self.communication_options.merge(options))
