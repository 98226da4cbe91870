"""KV that stays for another replica or comes from one, and the requests that go with it.

What blocks belong to, beside the requests of `RequestTable`:

- a *hold*: blocks that others copy, one more reference to each;
- a *reservation*: blocks, and a slot of the batch, for a request that is to come;
- a *detached* request: its blocks, and its slot, until it is freed or put back.

Nobody here reads a clock: holds and reservations have ends, and whoever has the clock asks which are over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from onbeat.core.errors import InvalidRequest
from onbeat.core.handover import Detached
from onbeat.core.request import Request
from onbeat.scheduler.replica.planner import StepsInFlight
from onbeat.scheduler.replica.policies import Policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable


@dataclass(slots=True)
class _Hold:
    lease_end: float = inf
    block_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Reservation:
    lease_end: float
    block_ids: list[int]
    snapshot: int | None
    """Where its state goes, of a model that keeps one."""


class Handovers:
    """The verbs by which KV, and requests with theirs, go from one replica's scheduler to another's.

    A move in stages, as in Llumnix (Sun et al., OSDI 2024, section 4.2): `reserve` at the destination; `hold`
    at the source, and copy, while the request runs on; `detach`, and copy the rest; `adopt` at the
    destination; `free` at the source, or `reattach` where anything went wrong.

    Parameters
    ----------
    table : where the replica's requests are.
    policy : how they are planned.
    in_flight : the steps that have not come back, the oldest first.
    accept : makes the state of a request that another replica has taken; refuses one that can never run here.
    release_batch : called when requests have left, which may end a batch.
    """

    def __init__(
        self,
        table: RequestTable,
        policy: Policy,
        in_flight: StepsInFlight,
        *,
        accept: Callable[[Request, float], RequestState],
        release_batch: Callable[[], None],
    ) -> None:
        self._table = table
        self._kv = table.kv
        self._policy = policy
        self._in_flight = in_flight
        self._accept = accept
        self._release_batch = release_batch
        self._holds: dict[str, _Hold] = {}
        self._reservations: dict[str, _Reservation] = {}
        self.leaving: dict[str, RequestState] = {}
        """Requests that are to leave the batch once no step in flight has them."""
        self.detached: dict[str, RequestState] = {}
        """Requests that have left the batch, by id."""
        self._answers: list[tuple[str, Detached | None]] = []

    # --- the source: KV that others copy --------------------------------------------------------------

    def hold(self, request_id: str, lease_end: float) -> tuple[int, ...] | None:
        """Keep KV of a request for others to copy: full blocks, which no step will write to.

        The request may run on, end, or be preempted. Called again, it holds the blocks that are full by now,
        and the lease lasts until its new end.

        Parameters
        ----------
        lease_end : when `overdue_holds` tells that nobody has released it, seconds.

        Returns
        -------
        All its blocks that are held, in the order of its tokens; None where there is nothing to hold, or what
        was held is unsound.
        """
        state = self._table.states.get(request_id)
        hold = self._holds.get(request_id)
        if state is not None and state.status is RequestStatus.RUNNING:
            num_full = self.num_full_tokens(request_id) // self._kv.block_size
            if num_full and hold is None:
                hold = self._holds[request_id] = _Hold()
            if hold is not None:  # what was held before a preemption holds the same tokens still
                more_ids = state.block_ids[len(hold.block_ids) : num_full]
                self._kv.pool.hold(more_ids)
                hold.block_ids += more_ids
        if hold is None or hold.lease_end == -inf:
            return None
        hold.lease_end = lease_end
        return tuple(hold.block_ids)

    def num_full_tokens(self, request_id: str) -> int:
        """Return the tokens of the blocks of a request that `hold` would hold by now."""
        state = self._table.states.get(request_id)
        if state is None or state.status is not RequestStatus.RUNNING:
            return 0
        # Those with KV that steps have come back with.
        num_computed = state.num_computed_tokens - self._in_flight.num_new_tokens(state)
        num_valid = min(num_computed, state.num_tokens - 1)
        if self._kv.keeps_states:
            num_valid = max(
                num_valid - 1, 0
            )  # some is to be copied once it stands still: its state comes then
        return num_valid - num_valid % self._kv.block_size

    def release_hold(self, request_id: str) -> None:
        """Give up the KV that is held of a request; an id without any is ignored."""
        hold = self._holds.pop(request_id, None)
        if hold is not None:
            self._kv.pool.release(hold.block_ids)

    def overdue_holds(self, now: float) -> list[str]:
        """Return the requests whose KV is held beyond its lease: whoever asks releases it."""
        return [request_id for request_id, hold in self._holds.items() if hold.lease_end <= now]

    # --- the source: requests that leave --------------------------------------------------------------

    def detach(self, request_id: str) -> None:
        """Take a running request out of the batch, once the steps in flight that have it are back.

        Its blocks and its slot stay until `free`, `reattach` or an abort. `take_detached` tells what became
        of it: it may end, or be preempted, with these very steps. One whose prompt is being scored stays:
        what is known of it does not go with its KV. So does one with a state that no step has had yet.
        """
        state = self._table.states.get(request_id)
        if (
            state is None
            or state.status is not RequestStatus.RUNNING
            or state.scores_prompt
            or (self._table.kv.keeps_states and state.request_id in self._table.unannounced)
        ):
            self._answers.append((request_id, None))
            return
        self.leaving[request_id] = state
        state.is_in_flight = True
        self.settle()

    def settle(self) -> None:
        """Take those out of the batch who are to leave it and are in no step in flight; after each update.

        Holds of KV that is unsound end first, so that nobody goes on with a copy.
        """
        if unsound := self._kv.pool.unsound_ids:
            for hold in (each for each in self._holds.values() if not unsound.isdisjoint(each.block_ids)):
                hold.lease_end = -inf
            unsound.clear()
        if not self.leaving:
            return
        for request_id, state in list(self.leaving.items()):
            if self._in_flight.num_new_tokens(state):
                state.is_in_flight = True  # a step that came back has cleared it
                continue
            del self.leaving[request_id]
            state.is_in_flight = False
            detached = None
            if state.status is RequestStatus.RUNNING:
                self._table.take_out(state)
                self.detached[request_id] = state
                self._table.num_slots_kept += 1
                detached = self._describe(state)
            self._answers.append((request_id, detached))
        self._release_batch()

    def take_detached(self) -> list[tuple[str, Detached | None]]:
        """Return what became of requests that were to leave since the last call; None: it stays where it is.

        Ask after `detach`, and after each update.
        """
        answers, self._answers = self._answers, []
        return answers

    def reattach(self, request_id: str) -> bool:
        """Let a detached request go on here, as if nothing had been; False where there is none."""
        state = self.detached.pop(request_id, None)
        if state is not None:
            self._table.num_slots_kept -= 1
            self._table.put_in(state, self._next_step_id, is_back=True)
        return state is not None

    def free(self, request_id: str) -> RequestState | None:
        """Forget a detached request that goes on elsewhere, or has ended, and return it; None without one."""
        state = self.detached.pop(request_id, None)
        if state is not None:
            self._table.num_slots_kept -= 1
            self._table.let_go(state)
        return state

    # --- the destination ------------------------------------------------------------------------------

    def reserve(self, handover_id: str, num_tokens: int, lease_end: float) -> tuple[int, ...] | None:
        """Keep a slot of the batch, and blocks for so many tokens, for a request that is to come.

        Called again, it has more blocks if it needs them, and a new end.

        Parameters
        ----------
        lease_end : when `overdue_reservations` tells that nobody has come, seconds.

        Returns
        -------
        All its blocks; None where slot or blocks lack: then nothing has changed. Steps in flight may still
        write to new ones, for requests that have ended meanwhile: whoever copies waits until these are back.
        """
        known = self._reservations.get(handover_id)
        block_ids = [] if known is None else known.block_ids
        num_more = max(self._kv.num_blocks_for(num_tokens) - len(block_ids), 0)
        if (known is None and not self._has_slot) or num_more > self._kv.pool.num_free_blocks:
            return None
        snapshot = self._kv.snapshots.take() if known is None else known.snapshot
        block_ids += self._kv.pool.allocate(num_more)
        self._reservations[handover_id] = _Reservation(lease_end, block_ids, snapshot)
        self._table.num_slots_kept += known is None
        return tuple(block_ids)

    def state_slot(self, handover_id: str) -> int:
        """Return where the state of a request that is to come goes, of a model that keeps them."""
        snapshot = self._reservations[handover_id].snapshot
        assert snapshot is not None, "the model keeps states"
        return self._table.max_num_seqs + snapshot

    def release_reservation(self, handover_id: str) -> None:
        """Give a reservation up; an id without one is ignored. Nobody may write to its blocks any more."""
        known = self._reservations.pop(handover_id, None)
        if known is not None:
            self._table.num_slots_kept -= 1
            self._kv.pool.release(known.block_ids)
            self._kv.snapshots.give_back(known.snapshot)

    def overdue_reservations(self, now: float) -> list[str]:
        """Return the hand-overs whose reservations are beyond their leases: whoever asks releases them."""
        return [each for each, reservation in self._reservations.items() if reservation.lease_end <= now]

    def adopt(self, handover_id: str, request: Request, detached: Detached, now: float) -> None:
        """Let a request join the batch whose KV has been copied into reserved blocks.

        Nothing of it is computed again, and nobody is preempted for it: its slot and blocks are there. It is
        never refused for want of capacity.

        Parameters
        ----------
        request : `detached.moved(...)` of the request that was sent to the other replica.
        now : seconds.

        Raises
        ------
        InvalidRequest : the reservation is not there, or too small; the id is in use; or see `Scheduler.add`.
        PromptTooLong : the request does not fit the context here.
        """
        reservation = self._reservations.get(handover_id)
        num_external_tokens = request.num_external_tokens
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids)
        is_in_prompt = num_external_tokens < num_tokens - 1
        # A chunk takes no blocks: they are there when it is planned.
        num_needed = num_tokens if is_in_prompt else num_external_tokens
        num_blocks = 0 if reservation is None else len(reservation.block_ids)
        if reservation is None or num_blocks < self._kv.num_blocks_for(num_needed):
            raise InvalidRequest(
                f"hand-over {handover_id!r} has {num_blocks} blocks here, too few for {num_needed} tokens "
                "that are to be adopted; reserve it first, and adopt before its end",
                param="handover_id",
            )
        if self._policy.known.holds_finished:
            raise InvalidRequest(
                "the policy of this replica runs whole batches, with memory for each from its start, so "
                "nobody can join one; move the request to a replica with another policy",
                param="handover_id",
            )
        state = self._accept(request, now)
        if self._policy.known.keeps_deadlines and detached.deadlines is not None:
            state.slo.go_on(detached.deadlines)
        state.scheduled_time, state.num_preemptions = detached.scheduled_time, detached.num_preemptions
        state.num_cached_tokens = detached.num_cached_tokens
        self._table.rank(state)
        del self._reservations[handover_id]
        self._table.num_slots_kept -= 1
        self._kv.adopt(state, reservation.block_ids, num_external_tokens)
        state.places_to_keep = self._kv.places_to_keep(state)
        self._table.put_in(state, self._next_step_id, snapshot=reservation.snapshot)
        if self._policy.slo is not None:
            # Another replica has charged its prompt.
            self._policy.slo.tracker.tenants.on_arrival(state.request.tenant)
            self._policy.slo.tracker.tenants.on_leave(state.request.tenant)

    # --- accounts -------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError unless each request has one owner, and each reference to a block too."""
        states = self._table.states
        assert not self.detached.keys() & states.keys(), "a detached request runs"
        assert all(state.status is RequestStatus.DETACHED for state in self.detached.values())
        assert all(
            state.is_in_flight or state.status is RequestStatus.FINISHED for state in self.leaving.values()
        ), "a step may take a request that is to leave"
        kept = [hold.block_ids for hold in self._holds.values()]
        kept += [reservation.block_ids for reservation in self._reservations.values()]
        kept += [state.held_ids for state in self.detached.values()]
        num_kept = len(self._reservations) + len(self.detached)
        assert self._table.num_slots_kept == num_kept, "a slot is kept for nobody"
        self._table.check_invariants(chain.from_iterable(kept))

    @property
    def _has_slot(self) -> bool:
        """Whether a request may come, with its state where it has one."""
        snapshots = self._kv.snapshots
        has_place = not self._kv.keeps_states or snapshots.num_taken < snapshots.num_places
        return has_place and len(self._table.running) + self._table.num_slots_kept < self._table.max_num_seqs

    @property
    def _next_step_id(self) -> int:
        """What no planned step has reached yet."""
        return self._in_flight[-1].step_id + 1 if self._in_flight else 0

    def _describe(self, state: RequestState) -> Detached:
        num_kv_tokens = state.num_computed_tokens
        assert not state.num_in_flight_tokens, "a step in flight has it"
        assert num_kv_tokens < state.num_tokens
        return Detached(
            request_id=state.request_id,
            output_token_ids=tuple(state.output_token_ids),
            num_kv_tokens=num_kv_tokens,
            block_ids=self._kv.moved_ids(state),
            scheduled_time=state.scheduled_time,
            num_cached_tokens=state.num_cached_tokens,
            num_preemptions=state.num_preemptions,
            deadlines=state.slo.deadlines() if self._policy.known.keeps_deadlines else None,
        )
