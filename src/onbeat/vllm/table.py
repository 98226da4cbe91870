"""vLLM's requests as the states that our policy plans with."""

from __future__ import annotations

from onbeat.core.request import Request, SamplingParams
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.tracker import SLOTracker
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.kv_view import VLLMKVView
from onbeat.vllm.surface import EngineRequest, Surface


class EngineTable:
    """Follows what vLLM does with requests: the table of our planner, as `RequestTable` is elsewhere.

    vLLM decides: a step that was not planned here, a preemption for want of memory and an abort are seen in
    the next `sync`.

    Parameters
    ----------
    tracker : told of first runs and of ends.
    """

    def __init__(self, surface: Surface, tracker: SLOTracker) -> None:
        self.running = RunningList()
        self.waiting = WaitingQueue()
        self.states: dict[str, RequestState] = {}
        self.foreign: list[EngineRequest] = []
        """Requests that run and are vLLM's own to plan."""
        self.requests: dict[str, EngineRequest] = {}
        self.kv = VLLMKVView(surface, self.requests)
        self._held: dict[str, RequestState] = {}
        """Requests that wait for something else: a grammar, or a connector."""
        self._stale: list[RequestState] = []
        """Preempted requests of which tokens were in flight when last seen."""
        self._surface, self._tracker = surface, tracker
        self._per_step = 1 + surface.num_drafts

    def asked(self, request: EngineRequest, terms: RequestObjectives, arrival: float) -> Request:
        """Return a request of vLLM's as one of ours.

        Parameters
        ----------
        arrival : seconds of the clock that plans go by.
        """
        return Request(
            request_id=request.request_id,
            prompt_token_ids=range(request.num_prompt_tokens),
            sampling=SamplingParams(max_tokens=max(int(request.max_tokens or 1), 1)),
            arrival=arrival,
            num_prompt_logprobs=self._surface.num_prompt_logprobs(request),
            slo=terms.slo,
            slo_class=terms.slo_class,
            weight=terms.weight,
            tenant=terms.tenant,
            shed=terms.shed,
        )

    def add(self, state: RequestState) -> None:
        """Let a new request wait."""
        self._rank(state)
        self.states[state.request_id] = state
        self._wait(state)

    def requeue(self, state: RequestState) -> None:
        """Give a waiting request the place that its deadline, or the loss of it, asks for."""
        is_held = state.request_id in self._held
        if not is_held:
            self.waiting.remove(state)
        self._rank(state)
        if not is_held:
            self.waiting.push(state)

    def may_join(self, state: RequestState) -> bool:
        """Whether a request that waits for a plan does so still; else vLLM loads KV for it by now."""
        if self._surface.may_wait(self.requests[state.request_id]):
            return True
        self.waiting.remove(state)
        self._held[state.request_id] = state
        return False

    def drop(self, state: RequestState) -> None:
        """Forget a request, however it ended."""
        if self.states.pop(state.request_id, None) is None:
            self.requests.pop(state.request_id, None)
            return
        self._tracker.on_drop(state)
        if state.status is RequestStatus.RUNNING:
            self.running.remove(state)
        elif self._held.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        state.status = RequestStatus.FINISHED
        state.block_ids = []
        del self.requests[state.request_id]

    def sync(self, now: float) -> None:
        """See where vLLM's requests stand. Costs what the batch is long, not what waits."""
        surface, states, kv = self._surface, self.states, self.kv
        for state in list(self._held.values()):
            self._look_after(state)
        kv.promised, self.foreign = 0, []
        running = surface.scheduler.running
        for request in running:
            known = states.get(request.request_id)
            if known is None:
                self.foreign.append(request)
                continue
            if known.status is not RequestStatus.RUNNING:
                self.join(known, request.num_computed_tokens, now)
            self._follow(known, request)
        if len(self.running) > len(running) - len(self.foreign):
            for state in list(self.running):
                if not surface.is_running(self.requests[state.request_id]):
                    self._leave(state)
        for state in self._stale:
            if state.status is RequestStatus.WAITING:
                request = self.requests[state.request_id]
                state.follow(request.num_tokens, 0, surface.num_stale(request))
        self._stale = [state for state in self._stale if state.num_in_flight_tokens]

    def _follow(self, state: RequestState, request: EngineRequest) -> None:
        in_flight = certain = request.num_output_placeholders
        if in_flight:
            certain = -(-in_flight // self._per_step)
        uncertain = in_flight - certain
        state.follow(request.num_tokens, request.num_computed_tokens - uncertain, certain)
        self.kv.follow(state, uncertain)

    def join(self, state: RequestState, num_cached: int, now: float) -> None:
        """Let a request run that vLLM has admitted.

        Parameters
        ----------
        num_cached : tokens of it that the prefix cache held.
        """
        if self._held.pop(state.request_id, None) is None:
            self.waiting.remove(state)
        is_first = not state.has_run
        state.status, state.admitted_step_id = RequestStatus.RUNNING, 0
        if is_first:
            state.scheduled_time = now
            state.num_cached_tokens = min(num_cached, state.num_prompt_tokens)
            self._tracker.on_start(state)
        self.running.insert_sorted(state)

    def _leave(self, state: RequestState) -> None:
        """Let a request wait that vLLM has preempted, or forget it."""
        request = self.requests[state.request_id]
        if request.is_finished():
            self.drop(state)
            return
        self.running.remove(state)
        state.status = RequestStatus.WAITING
        state.block_ids, state.num_allocated_tokens = [], 0
        state.num_preemptions = request.num_preemptions
        state.follow(request.num_tokens, 0, self._surface.num_stale(request))
        state.note_hits(0)
        self._stale.append(state)
        self._rank(state)
        self._wait(state)

    def _wait(self, state: RequestState) -> None:
        if self._surface.may_wait(self.requests[state.request_id]):
            self.waiting.push(state)
        else:
            self._held[state.request_id] = state

    def _look_after(self, state: RequestState) -> None:
        """Let a request wait for its turn once nothing else holds it."""
        request = self.requests[state.request_id]
        if request.is_finished():
            self.drop(state)
        elif self._surface.may_wait(request):
            del self._held[state.request_id]
            self.waiting.push(state)

    def _rank(self, state: RequestState) -> None:
        state.sort_key = (state.slo.rank, *state.sort_key[1:])
