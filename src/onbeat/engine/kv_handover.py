"""The hand-over of KV as an engine carries it out: the scheduler's verbs, their record, leases and copies.

`KVTransfers` is one engine's part in copies of KV: what it serves, and what it fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from onbeat.core.errors import KVUnavailable
from onbeat.core.handover import Detached
from onbeat.core.request import Request
from onbeat.engine.kv_access import BlockMemory, KVSource
from onbeat.engine.kv_transfer import PULL_SECONDS, Leases, TcpTransport
from onbeat.recording.log import HandoverVerb, RecordedAdoption
from onbeat.recording.writer import RecordWriter
from onbeat.scheduler.replica.move_agent import Departure
from onbeat.scheduler.replica.scheduler import Scheduler

MOST_PULLS = 2
"""At once: copies share the memory's bandwidth with the steps."""


class KVTransfers:
    """Serves an engine's blocks, and pulls others'.

    Parameters
    ----------
    memory : the engine's KV.

    Attributes
    ----------
    leases : what others may copy.
    endpoint : where they find it.
    """

    def __init__(self, memory: BlockMemory, transport: TcpTransport) -> None:
        self.memory = memory
        self.leases = Leases()
        self._transport = transport
        self._summing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onbeat-lend")
        self._pool = ThreadPoolExecutor(max_workers=MOST_PULLS, thread_name_prefix="onbeat-pull")
        self.endpoint = transport.serve(memory, self.leases)

    def summed(self, source: KVSource) -> Future[KVSource]:
        """Return, from a thread of its own, blocks that are lent with their checksums.

        Each is read once a lease, so that further ones cost nothing for those before.
        """
        return self._summing.submit(self._sum, source)

    def _sum(self, source: KVSource) -> KVSource:
        known = self.leases.checksums(source.lease_id, source.serial)
        for block_id in source.ids:
            if block_id not in known:
                known[block_id] = self.memory.checksum(block_id)
        return replace(source, checksums=tuple(known[block_id] for block_id in source.ids))

    def pull(
        self, source: KVSource, first_block: int, into: Sequence[int], *, after: Future[Any] | None = None
    ) -> Future[int]:
        """Copy blocks in a thread of its own; the future has how many bytes that were, or `KVUnavailable`.

        Nothing is written to the blocks once the future is done; until then they must be nobody else's.

        Parameters
        ----------
        first_block : counted from the first of `source`.
        into : our block for each that is copied.
        after : what must be done before anything is written.
        """
        return self._pool.submit(partial(self._pull, source, first_block, tuple(into), after))

    def _pull(
        self, source: KVSource, first_block: int, into: Sequence[int], after: Future[Any] | None
    ) -> int:
        if after is not None and wait([after], timeout=PULL_SECONDS).not_done:
            raise KVUnavailable(f"a step that may write to the blocks has not ended in {PULL_SECONDS:g} s")
        if len(source.checksums) != len(source.ids):
            raise KVUnavailable(f"the checksums of the KV of {source.lease_id!r} were not sent with it")
        num_bytes = self._transport.pull(source, first_block, self.memory, into)
        for number, block_id in enumerate(into, first_block):
            if self.memory.checksum(block_id) != source.checksums[number]:
                raise KVUnavailable(
                    f"block {number} of the KV of {source.lease_id!r} has changed on the way; it is not "
                    "used. If that happens again, look at the machine's memory and network"
                )
        return num_bytes

    def close(self) -> None:
        """Let copies end, and serve no more; call it before the memory goes."""
        for pool in (self._summing, self._pool):
            pool.shutdown(wait=True, cancel_futures=True)
        self._transport.close()


LEASE_SECONDS = 30.0
"""For as long KV is lent, or room reserved, unless somebody asks again."""


@dataclass(slots=True)
class _Reservation:
    """A reservation, and the copies into it."""

    block_ids: tuple[int, ...]
    after: Future[Any] | None
    """The newest step in flight when the last block was given: until it is back, steps may write there."""
    pulls: list[Future[int]] = field(default_factory=list)
    is_given_up: bool = False
    has_state: bool = False
    """Whether a copy brings the request's state."""

    @property
    def is_pulling(self) -> bool:
        return any(not pull.done() for pull in self.pulls)


class KVHandover:
    """Lends an engine's KV and takes that of others. Called by the step loop's thread only, between steps.

    A block is lent no longer than it stays what it is, and nobody is given a block that a copy still writes
    to: what is released while a copy runs goes back when that has ended.

    Parameters
    ----------
    scheduler : whose requests move.
    transfers : copies; closed with this.
    clock : seconds.
    recorder : told of every verb.
    newest_step : the step that was launched last, if it has not come back.
    is_serial : whether no step is launched before the last has come back.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        transfers: KVTransfers,
        *,
        clock: Callable[[], float],
        recorder: RecordWriter | None,
        newest_step: Callable[[], Future[Any] | None],
        is_serial: bool = False,
    ) -> None:
        self._handover = scheduler.handover
        self._transfers, self._memory = transfers, transfers.memory
        self.num_full_tokens, self.summed = self._handover.num_full_tokens, transfers.summed
        self._clock = clock
        self._recorder = recorder
        self._newest_step = newest_step
        self._is_serial = is_serial
        self._has_let_go = False
        """Whether blocks may have become free since the last step was launched."""
        self._reservations: dict[str, _Reservation] = {}
        self._lent: set[str] = set()
        """Requests whose KV is held."""
        self._detached: set[str] = set()

    @property
    def is_pulling(self) -> bool:
        """Whether a copy writes to this engine's blocks."""
        return any(reservation.is_pulling for reservation in self._reservations.values())

    # --- the source -----------------------------------------------------------------------------------

    def hold(self, request_id: str, seconds: float = LEASE_SECONDS) -> KVSource | None:
        """Lend the full blocks of a request, or more of them, or for longer; None where it has none.

        Raises
        ------
        KVUnavailable : too many are lent.
        """
        now = self._clock()
        block_ids = self._handover.hold(request_id, now + seconds)
        self._note("hold", request_id, now, block_ids=block_ids)
        if block_ids is None:
            return None
        self._lent.add(request_id)
        leases = self._transfers.leases
        if request_id not in self._detached:
            leases.grant(request_id, block_ids)
        return leases.source(request_id, self._transfers.endpoint)

    def unhold(self, request_id: str) -> None:
        """Lend it no longer; one without any is ignored."""
        self._has_let_go = True
        self._lent.discard(request_id)
        if request_id not in self._detached:
            self._transfers.leases.revoke(request_id)
        self._handover.release_hold(request_id)
        self._note("unhold", request_id)

    def detach(self, request_id: str) -> None:
        """Take a request out of the batch at the end of the steps under way; `take_departures` answers."""
        self._handover.detach(request_id)
        self._note("detach", request_id)

    def take_departures(self) -> list[Departure[KVSource]]:
        """Return what became of those who were to leave since the last call; ask after each step."""
        departures = []
        for request_id, detached in self._handover.take_detached():
            self._note("left", request_id, is_out=detached is not None)
            source = None
            if detached is not None:
                self._detached.add(request_id)
                state = self._memory.state_of(request_id)
                self._transfers.leases.grant(request_id, detached.block_ids + state)
                source = self._transfers.leases.source(request_id, self._transfers.endpoint)
                source = replace(source, block_ids=detached.block_ids, state=state)
            departures.append(Departure(request_id, detached, source))
        return departures

    def reattach(self, request_id: str) -> bool:
        """Let a detached request go on here; False where there is none."""
        self._take_back(request_id)
        is_back = self._handover.reattach(request_id)
        self._note("reattach", request_id, is_out=is_back)
        return is_back

    def free(self, request_id: str) -> None:
        """Forget a request that goes on elsewhere, and lend its KV no longer."""
        self._has_let_go = True
        self._take_back(request_id)
        if request_id in self._lent:
            self.unhold(request_id)
        self._handover.free(request_id)
        self._note("free", request_id)

    def on_abort(self, request_ids: Iterable[str]) -> None:
        """Lend the KV of detached requests no longer; these and others are about to be dropped."""
        self._has_let_go = True
        for request_id in request_ids:
            self._take_back(request_id)

    def _take_back(self, request_id: str) -> None:
        if request_id in self._detached:
            self._detached.discard(request_id)
            self._transfers.leases.revoke(request_id)

    # --- the destination ------------------------------------------------------------------------------

    def reserve(self, handover_id: str, num_tokens: int, seconds: float = LEASE_SECONDS) -> bool:
        """Keep a slot and blocks, or more of them, or for longer; False where they lack."""
        now = self._clock()
        block_ids = self._handover.reserve(handover_id, num_tokens, now + seconds)
        self._note("reserve", handover_id, now, num_tokens=num_tokens, block_ids=block_ids)
        if block_ids is None:
            return False
        reservation = self._reservations.setdefault(handover_id, _Reservation((), None))
        if len(block_ids) > len(reservation.block_ids):
            reservation.block_ids, reservation.after = block_ids, self._last_writer()
        reservation.is_given_up = False
        return True

    def on_launch(self) -> None:
        """Hear that a step has been planned: what is free now is nothing that it writes to."""
        self._has_let_go = False

    def _last_writer(self) -> Future[Any] | None:
        """Return the last step that may still write to blocks which are free now; None where none does."""
        if self._is_serial and not self._has_let_go and not self._memory.states.num_slots:
            return None
        return self._newest_step()

    def pull(self, handover_id: str, source: KVSource, first_block: int) -> Future[int]:
        """Copy the blocks of a source into reserved ones, from one of them on; the future has the bytes.

        It is cancelled if the reservation is released before the copy begins.

        Raises
        ------
        KVUnavailable : so many are not reserved; later, in the future: they cannot be had.
        """
        reservation, end = self._reservations.get(handover_id), len(source.block_ids)
        if reservation is None or len(reservation.block_ids) < end:
            raise KVUnavailable(
                f"{end} blocks are to come by hand-over {handover_id!r}, but "
                f"{0 if reservation is None else len(reservation.block_ids)} are reserved for it"
            )
        into = reservation.block_ids[first_block:end]
        if source.state:
            slot = self._handover.state_slot(handover_id)
            into, reservation.has_state = (*into, ~slot), True
        pull = self._transfers.pull(source, first_block, into, after=reservation.after)
        reservation.pulls = [each for each in reservation.pulls if not each.done()] + [pull]
        return pull

    def release(self, handover_id: str) -> None:
        """Give a reservation back, once no copy writes there; without any it is ignored."""
        reservation = self._reservations.get(handover_id)
        if reservation is None:
            return
        for pull in reservation.pulls:
            pull.cancel()
        reservation.is_given_up = reservation.is_pulling
        if not reservation.is_given_up:
            del self._reservations[handover_id]
            self._handover.release_reservation(handover_id)
            self._note("release", handover_id)

    def adopt(self, handover_id: str, request: Request, detached: Detached) -> None:
        """Go on with a request whose KV has been copied into a reservation.

        Parameters
        ----------
        request : `detached.moved(...)` of the request that was sent to the other engine.

        Raises
        ------
        InvalidRequest, PromptTooLong : see `Handovers.adopt`.
        KVUnavailable : a copy still runs.
        """
        reservation = self._reservations.get(handover_id)
        if reservation is not None and reservation.is_pulling:
            raise KVUnavailable(f"the KV of hand-over {handover_id!r} is still on its way")
        has_state = reservation is None or reservation.has_state or not request.num_external_tokens
        if self._memory.states.num_slots and not has_state:
            raise KVUnavailable(f"the state of hand-over {handover_id!r} has not come with its KV")
        now = self._clock()
        self._handover.adopt(handover_id, request, detached, now)
        self._reservations.pop(handover_id, None)
        if self._recorder is not None:
            self._recorder.add(request, now, adoption=RecordedAdoption.of(handover_id, detached))

    # --- both -----------------------------------------------------------------------------------------

    def tend(self) -> None:
        """End leases that nobody has renewed, and give back what copies have let go of."""
        if not (self._reservations or self._lent):
            return
        now = self._clock()
        for request_id in self._handover.overdue_holds(now):
            self.unhold(request_id)
        overdue = self._handover.overdue_reservations(now)
        given_up = [handover_id for handover_id, kept in self._reservations.items() if kept.is_given_up]
        for handover_id in dict.fromkeys([*overdue, *given_up]):
            self.release(handover_id)

    def close(self) -> None:
        """Serve no more, and let copies end; call it before the memory goes."""
        self._transfers.close()

    def _note(self, verb: HandoverVerb, name: str, now: float | None = None, **answer: Any) -> None:
        if self._recorder is not None:
            self._recorder.handover(verb, name, self._clock() if now is None else now, **answer)
