"""A channel: a session over a communicator of its own. Brings its records, and has its steps carried out.

The steps are a generator that yields requests (`transport.Steps`), so nothing here knows how a request is waited for.
Records and values go over the same communicator: all workers take the same steps in the same order, and where they do
not, nothing is moved behind the record that says so.
"""

from __future__ import annotations

from aiodist._workers.record import Found, RecordBuffers
from aiodist._workers.session import Decision, Session, State, Step
from aiodist._workers.transport import Communicator, Steps


class Carrier:
    """What a channel's steps are for. The generators end when the workers have moved what there is to move."""

    def move(self, channel: Channel, step: Step, found: Found) -> Steps[None]:
        """Move the values of a step that all workers have agreed on."""
        raise NotImplementedError

    def gather(self, channel: Channel, step: Step | None) -> Steps[None]:
        """Move the values of a step in which replicas are absent; None where all of this worker's are."""
        raise NotImplementedError

    def finish_join(self, channel: Channel) -> Steps[None]:
        """Find out which replica was the last to join, and let all go on."""
        raise NotImplementedError

    def compare_groups(self, channel: Channel) -> Steps[bool]:
        """Return whether all workers have made the same groups."""
        raise NotImplementedError

    def diverged(self, channel: Channel) -> None:
        """Hear that the workers are at different calls."""

    def over(self, channel: Channel) -> None:
        """Hear that all replicas of all workers have ended."""


class Channel:
    """A session over a communicator.

    Args:
        session: the order of steps.
        communicator: nobody else uses it meanwhile.
        carrier: what the steps are for.
    """

    def __init__(self, session: Session, communicator: Communicator, carrier: Carrier) -> None:
        self.session = session
        self.communicator = communicator
        self.records = RecordBuffers(communicator.rank, communicator.size)
        self._carrier = carrier
        self._advancing = False

    def advance(self) -> Steps[None]:
        """Take what steps there are; at once where another call does that already."""
        if self._advancing:
            return
        self._advancing = True
        try:
            yield from self._advance()
        finally:
            self._advancing = False

    def _advance(self) -> Steps[None]:
        session = self.session
        while (record := session.next_record()) is not None:
            yield self.records.post(record, self.communicator)
            found, step = self.records.read(), session.step
            match session.take(found):
                case Decision.MOVE:
                    assert step is not None
                    yield from self._carrier.move(self, step, found)
                    session.moved()
                case Decision.GATHER:
                    yield from self._carrier.gather(self, step)
                    session.moved()
                case Decision.FINISH_JOIN:
                    yield from self._carrier.finish_join(self)
                    session.finish_join()
                case Decision.COMPARE_GROUPS:
                    alike = yield from self._carrier.compare_groups(self)
                    session.compared(alike=alike)
                    (self._carrier.over if alike else self._carrier.diverged)(self)
                case Decision.DIVERGED:
                    self._carrier.diverged(self)
                case Decision.OVER:
                    self._carrier.over(self)
                case None:
                    return

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.session.state in (State.IDLE, State.OVER)
