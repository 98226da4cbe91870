"""The scheduler of one replica: which request runs which tokens in the next step.

A replica refuses requests that it can never run, and those that find its queue full.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from math import inf

from onbeat.core.errors import InvalidRequest, Overloaded, PromptTooLong, counted
from onbeat.core.fleet import ReplicaLoad
from onbeat.core.request import FinishReason, Request, RequestOutput, WholeRequest
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput, new_tuple
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.guides import take_turns, trim_prompts
from onbeat.scheduler.replica.handover import Handovers
from onbeat.scheduler.replica.load_report import LoadReporter
from onbeat.scheduler.replica.planner import Planner
from onbeat.scheduler.replica.policies import make_policy
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.results import StepResults
from onbeat.scheduler.replica.speculation.drafting import Drafting, make_drafting
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.scheduler_config import SchedulerConfig


def check_request(request: Request, config: SchedulerConfig, *known: Container[str]) -> None:
    """Refuse a request that could never run here.

    Parameters
    ----------
    known : ids of the requests that are here.

    Raises
    ------
    InvalidRequest : the id is in use, the prompt is empty, no token of the answer is left to generate, or
        more KV comes with it than it can have.
    PromptTooLong : the prompt, with what was generated of its answer, does not fit the context.
    """
    request_id, num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
    for ids in known:
        if request_id in ids:
            raise InvalidRequest(f"request id {request_id!r} is in use; use a new one", param="request_id")
    if num_prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    if request.pooling is not None:
        if num_prompt_tokens > config.max_model_len:
            raise PromptTooLong(
                f"the text has {num_prompt_tokens} tokens; this server takes at most {config.max_model_len}. "
                "Shorten it or serve with a larger max_model_len"
            )
    elif num_prompt_tokens >= config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; with an output token this server takes "
            f"at most {config.max_model_len}. Shorten it or serve with a larger max_model_len"
        )
    num_tokens = num_prompt_tokens + len(request.resumed_token_ids)
    if request.resumed_token_ids:
        _check_resumed(request, config, num_tokens)
    if not 0 <= request.num_external_tokens < num_tokens:
        raise InvalidRequest(
            f"num_external_tokens is {request.num_external_tokens} of {num_tokens} tokens; at least the last "
            "one is computed here",
            param="num_external_tokens",
        )


def _check_resumed(request: Request, config: SchedulerConfig, num_tokens: int) -> None:
    """Refuse a stream of which nothing is left to generate, or not here."""
    num_resumed, max_tokens = len(request.resumed_token_ids), request.sampling.max_tokens
    if num_resumed >= max_tokens:
        raise InvalidRequest(
            f"the request is resumed with {num_resumed} output tokens, but max_tokens is {max_tokens}; "
            "resume only what has not ended",
            param="resumed_token_ids",
        )
    if num_tokens >= config.max_model_len:
        raise PromptTooLong(
            f"the prompt has {num_tokens - num_resumed} tokens, and {num_resumed} of its answer were sent; "
            f"with another one this server takes at most {config.max_model_len}. Resume it where "
            "max_model_len is larger"
        )


def check_queue(
    request: Request, config: SchedulerConfig, *, num_places: int, num_waiting: int, num_tokens: int
) -> None:
    """Refuse a request that finds the queue full; of a whole request, all choices at once.

    What waits for the next step alone may fill the free places of the batch first.

    Parameters
    ----------
    num_places : that are free in the batch.
    num_waiting : requests that wait already.
    num_tokens : of the prompts that wait.

    Raises
    ------
    InvalidRequest : it has more choices than could run and wait here if it were alone.
    Overloaded : which limit is reached.
    """
    max_waiting, max_tokens = config.max_num_queued_reqs, config.max_num_queued_tokens
    num_choices, num_prompt_tokens = 1, len(request.prompt_token_ids)
    if request.whole is not None:
        _, num_choices, num_prompt_tokens = request.whole
    if max_waiting is not None:
        if num_choices > config.max_num_seqs + max_waiting:
            raise InvalidRequest(
                f"the request has {num_choices} choices; here at most {config.max_num_seqs} run "
                f"(max_num_seqs) and {max_waiting} wait (max_num_queued_reqs). Ask for fewer at once",
                param="n",
            )
        if num_waiting + num_choices > max_waiting + max(num_places, 0):
            raise Overloaded(
                f"the queue is full: it holds {counted(num_waiting, 'request')}, this is {num_choices} more, "
                f"and at most {max_waiting} may wait (max_num_queued_reqs); try again later"
            )
    if max_tokens is not None and num_tokens and num_tokens + num_prompt_tokens > max_tokens:
        raise Overloaded(
            f"the queue is full: it holds {counted(num_tokens, 'prompt token')}, this request has "
            f"{num_prompt_tokens}, and at most {max_tokens} may wait (max_num_queued_tokens); try "
            "again later"
        )


class Scheduler:
    """Plans steps and takes their results; pure, so that a live engine and a simulator run the same object.

    `schedule(now)` may be called again before the last step's `update`: such a step plans with tokens that
    are still in flight. Steps are updated in the order in which they were scheduled.

    Parameters
    ----------
    config : limits and the policy's name.
    step_time_model : told of every step's time; None where nobody predicts.
    """

    def __init__(self, config: SchedulerConfig, step_time_model: StepTimeModel | None = None) -> None:
        self.config = config
        self.step_time_model = step_time_model
        self.policy = make_policy(config, step_time_model)
        slo = self.policy.slo
        self.quantile = None if slo is None else slo.quantile
        """Of step times, to plan with; None is the mean."""
        self._drafting: Drafting | None = None
        if config.speculation is not None:
            self._drafting = make_drafting(config.speculation, step_time_model, quantile=self.quantile)
        self.table = RequestTable(config, None if slo is None else slo.tracker)
        self._states = self.table.states
        self.kv, self.running, self.waiting = self.table.kv, self.table.running, self.table.waiting
        self.planner = Planner(config, self.policy, self.table, step_time_model)
        self.in_flight = self.planner.in_flight
        self.handover = Handovers(
            self.table, self.policy, self.in_flight, accept=self._accept, release_batch=self._release_batch
        )
        """What takes KV, and requests with theirs, to other replicas and from them."""
        self.results = StepResults(self.table, self.planner, self._drafting)
        self._num_taken = 0
        self._load_reporter: LoadReporter | None = None

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running and will deliver more."""
        return len(self._states)

    def begin_again(self) -> list[str]:
        """Count what is taken from nothing, for another who counts; return the requests of the one before."""
        self._num_taken = 0
        return list(self._states)

    def add(self, request: Request, now: float | None = None) -> None:
        """Queue a request.

        Parameters
        ----------
        now : seconds; None is the request's arrival.

        Raises
        ------
        InvalidRequest : the id is in use, the prompt is empty, it is resumed with its whole answer, it comes
            with KV, or its choices are more than may run and wait.
        PromptTooLong : the request can never fit the context or the KV cache.
        Overloaded : as many requests or tokens wait as may (`max_num_queued_reqs`, `max_num_queued_tokens`),
            or it would have to wait for too long (`max_queue_seconds`).
        SLOUnattainable : it would miss its TTFT objective and asks to be refused then (`Request.shed`).
        """
        self._num_taken += 1
        check_request(request, self.config, self._states, self.handover.detached)
        if request.num_external_tokens:
            raise InvalidRequest(
                f"{request.num_external_tokens} tokens of the request have their KV elsewhere; it is to be "
                "adopted with them, or sent without",
                param="num_external_tokens",
            )
        config = self.config
        is_bound = config.max_num_queued_reqs is not None or config.max_num_queued_tokens is not None
        if is_bound and not (request.resumed_token_ids or self._has_choice_of(request.whole)):
            check_queue(
                request,
                config,
                num_places=self._num_free_places,
                num_waiting=len(self.waiting),
                num_tokens=self.waiting.num_prompt_tokens,
            )
        now = request.arrival if now is None else now
        self.planner.add(self.planner.new_state(request), now)

    def _has_choice_of(self, whole: WholeRequest | None) -> bool:
        """Return whether another choice of a whole request was taken; it was among the last that came."""
        if whole is None:
            return False
        others = (state.request.whole for state in reversed(self._states.values()))
        return any(other is not None and other.whole_id == whole.whole_id for other in others)

    @property
    def _num_free_places(self) -> int:
        """Places of the batch that what waits can fill; none if its prompts do not fit the free blocks."""
        kv, waiting = self.kv, self.waiting
        if waiting and kv.num_blocks_for(waiting.num_prompt_tokens) >= kv.pool.num_free_blocks:
            return 0
        num_beside = 0 if self.table.lockstep is None else self.table.lockstep.num_rows
        return self.config.max_num_seqs - len(self.running) - num_beside - self.table.num_slots_kept

    def load(self, now: float, *, busy: float = 0.0) -> ReplicaLoad:
        """Return how the replica stands, for whoever shares requests out. It changes no plan.

        Parameters
        ----------
        busy : seconds from now until the steps under way are expected to end.
        """
        if self._load_reporter is None:
            self._load_reporter = LoadReporter(self.config, self.policy, self.table, self.step_time_model)
        return self._load_reporter.take(now, num_taken=self._num_taken, busy=busy)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Drop requests and free their blocks; unknown or finished ids are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                outputs.append(state.last_output(FinishReason.ABORT))
                self.table.drop(state)
            elif (state := self.handover.free(request_id)) is not None:
                outputs.append(state.last_output(FinishReason.ABORT))
        self._release_batch()  # it may have been the last that kept its batch together
        return outputs

    @property
    def waits_for_fetches(self) -> bool:
        """Whether a request is paused, so that `on_fetched` may be all that lets a step run."""
        return any(state.is_paused for state in self._states.values())

    def on_fetched(self, num_fetched: Mapping[str, int], now: float) -> None:
        """Hear how much output of requests has been fetched; those who were paused for it go on.

        Parameters
        ----------
        num_fetched : request -> its output tokens so far, those included with which it came. An id that is
            not known is ignored, and so is less than was said before.
        now : seconds.
        """
        window = self.config.window_tokens or 0
        for request_id, num_tokens in num_fetched.items():
            state = self._states.get(request_id) or self.handover.detached.get(request_id)
            if state is None:
                continue
            was_paused = state.is_paused
            state.pause_at = max(state.pause_at, state.num_prompt_tokens + num_tokens + window)
            if was_paused and not state.is_paused:
                state.slo.go_on_at(now)
                if state.status is RequestStatus.ASIDE:
                    self.table.queue(state)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step, or return None where nothing can run (yet).

        A plan is made first, and then carried out: only then anything changes.
        """
        in_flight, table, planner = self.in_flight, self.table, self.planner
        has_waiting = self.waiting.length > 0
        if not (self.running or has_waiting or (table.lockstep is not None and table.lockstep.num_rows)):
            return None
        start = in_flight.last_plan = max(now, in_flight.busy_until) if in_flight else now
        if has_waiting and self.config.window_tokens is not None:
            self._give_way(start)
        plan = self._compose(start)
        has_rows = plan.decodes or plan.chunks or plan.admissions or plan.num_beside
        if not (has_rows or plan.preempted or plan.infeasible or plan.overdue):
            return None
        planner.commit(plan)
        if self._drafting is not None and plan.decodes:
            self._drafting.commit(plan)
        if plan.admissions or plan.num_kept < len(self.running) or plan.victims:
            table.dequeue_and_preempt(plan)
        if not has_rows:
            return None
        if self.kv.pool.kept.ends:
            self.kv.pool.kept.expire(now)
        step_id = in_flight.num_planned
        shape, rows, states, admitted = table.commit_rows(plan, now=now, step_id=step_id)
        if table.lockstep is not None and plan.num_beside:
            table.lockstep.begin_step(shape)
        step_rows = tuple(rows)
        planner.launch(
            shape, states, step_rows, start=start, planned_at=now, expected_tokens=plan.expected_tokens
        )
        if self.config.num_micro_batches > 1:
            table.mark_in_flight(states, is_in_flight=True)
        released_ids, preempted_ids, forgotten_ids = table.take_left()
        new_pages, self.kv.new_pages = self.kv.new_pages, []
        kept_states = self.kv.kept_states(states, step_rows) if self.kv.keeps_states else ()
        return new_tuple(
            SchedulerOutput,
            (
                *(step_id, step_rows, tuple(admitted), released_ids, shape),
                *(plan.budget, plan.budget_request_id, preempted_ids, forgotten_ids),
                *(kept_states, tuple(new_pages)),
            ),
        )

    def update(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> Sequence[RequestOutput]:
        """Take the tokens of the oldest step in flight; return what each request got.

        Parameters
        ----------
        scheduled : what `schedule` returned.
        result : one list of tokens for each row that samples.
        now : when the step ended, seconds.
        """
        in_flight = self.in_flight
        step = in_flight.end_oldest(now) if len(in_flight) > 1 else in_flight.popleft()
        assert step.step_id == scheduled.step_id, "steps come back in the order in which they were scheduled"
        if self.config.num_micro_batches > 1:
            self.table.mark_in_flight(step.states, is_in_flight=False)
        outputs = self.results.take(step, scheduled, result, now)
        if self.policy.known.holds_finished:
            self._release_batch()
        if self.handover.leaving or self.kv.pool.unsound_ids:
            self.handover.settle()
        return outputs

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues and blocks agree. Cheap enough for every idle moment."""
        self.handover.check_invariants()

    def _give_way(self, now: float) -> None:
        """Preempt paused requests, the last of the batch first, until the first that waits has its room."""
        head = self.waiting.peek()
        paused = [state for state in self.running if state.is_paused and not state.num_in_flight_tokens]
        while paused and head is not None:
            plan = self.planner.new_plan(now)
            if plan.num_slots_left > 0 and plan.has_blocks_for(head):
                return
            self.table.preempt(paused.pop())

    def _compose(self, now: float) -> StepPlan:
        """Plan a step. Nothing but the plan changes."""
        left = take_turns(self.running) if self.table.num_guided else inf
        plan = self.planner.new_plan(now)
        self.policy.composer.compose(plan)
        if self._drafting is not None and plan.decodes:
            self._drafting.plan(plan)
        if left < inf:
            trim_prompts(plan, left)
        return plan

    def _accept(self, request: Request, now: float) -> RequestState:
        """Return a request that has been taken elsewhere; raises as `add` where it can never run here."""
        check_request(request, self.config, self._states, self.handover.detached)
        state = self.planner.new_state(request)
        self.planner.begin(state, now)
        return state

    def _release_batch(self) -> None:
        """Let a batch go whose requests have all finished, where the policy holds them till then."""
        if self.policy.known.holds_finished and all(
            state.status is RequestStatus.PADDING for state in self.running
        ):
            for state in list(self.running):
                self.table.drop(state)
