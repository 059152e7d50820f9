"""A channel: a session over a communicator of its own. Contributes its records, and has its steps carried out.

The steps are a generator that yields requests (`transport.Steps`), so nothing here knows how a request is waited for.
Records and values go over the same communicator: all workers take the same steps in the same order, and where they do
not, nothing is moved behind the record that says so.
"""

from __future__ import annotations

from aiodist._core.errors import CollectiveError
from aiodist._workers.messages import Ask, GroupTag
from aiodist._workers.record import Agreement, Found, RecordBuffers
from aiodist._workers.session import Session, State, Step
from aiodist._workers.transport import Communicator, Steps


class Carrier:
    """What a channel's steps are for. The generators end when the workers have moved what there is to move.

    Attributes:
        told: trouble has been reported to the coordinator.
    """

    told = False

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
        raise NotImplementedError

    def over(self, channel: Channel) -> None:
        """Hear that all replicas of all workers have ended."""

    def asked(self, ask: Ask) -> None:
        """Tell what there is to tell, once the local replicas have settled, as others are in trouble."""
        raise NotImplementedError

    def tagged(self, tag: GroupTag) -> None:
        """Make the communicator of a group: all its workers do that now."""

    def tell(self, *, note: str = "") -> None:
        """Tell the coordinator this worker's part, once; from any thread."""
        raise NotImplementedError

    def tell_waiting(self, *, is_answer: bool = False) -> None:
        """Tell the coordinator what local replicas wait in, while nothing is wrong here."""

    def fail(self, error: CollectiveError) -> None:
        """End all that is under way."""
        raise NotImplementedError


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
        session, carrier = self.session, self._carrier
        while (record := session.next_record()) is not None:
            yield self.records.post(record, self.communicator)
            found, step = self.records.read(), session.step
            match session.take(found):
                case Agreement.ALIKE:
                    assert step is not None
                    yield from carrier.move(self, step, found)
                    session.moved()
                case Agreement.WITHOUT_SOME:
                    yield from carrier.gather(self, step)
                    session.moved()
                case Agreement.ALL_JOINED:
                    yield from carrier.finish_join(self)
                    session.finish_join()
                case Agreement.ENDED_UNSURE:
                    alike = yield from carrier.compare_groups(self)
                    session.compared(alike=alike)
                    (carrier.over if alike else carrier.diverged)(self)
                case Agreement.DIFFERENT:
                    carrier.diverged(self)
                case Agreement.ENDED:
                    carrier.over(self)
                case None:
                    return

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.session.state in (State.IDLE, State.OVER)
