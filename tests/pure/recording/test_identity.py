"""Whatever a scheduler was asked, a replay of the record decides the same."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from onbeat.core.request import UNKNOWN_GRAMMAR, FinishReason, Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.recording.log import ScheduleCall
from onbeat.recording.reader import Recording
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.scheduler_config import SpeculationConfig
from onbeat.simulator.replay.decisions import Replay
from onbeat.simulator.replay.history import read_history
from tests.examples import examples
from tests.pure.recording.recorded import start_run
from tests.pure.scheduler.driver import POLICY_NAMES, make_config, make_request


def step_time_model() -> Predictor:
    """Return a model with something to learn: the steps of the driver take about 0.1 s."""
    residual = ResidualModel.log_normal(0.1)
    return Predictor(lambda shape: 0.04 + 1e-3 * shape.num_new_tokens, residual).with_learning()


def reasons_by_id(run):
    return {name: str(reason) for name, reason in run.finished.items()}


class RecordedMachine(RuleBasedStateMachine):
    """Arrivals, aborts, failures, stops and steps in any order."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        order=st.sampled_from(["fcfs", "priority"]),
        depth=st.sampled_from([1, 2, 3]),
        num_blocks=st.integers(16, 40),
        prefix=st.booleans(),
        max_requests=st.sampled_from([None, 2]),
        max_tokens=st.sampled_from([None, 150]),
        draft_length=st.sampled_from([None, "fixed", "adaptive"]),
        is_pipeline=st.booleans(),
    )
    def start(
        self, policy, order, depth, num_blocks, prefix, max_requests, max_tokens, draft_length, is_pipeline
    ):
        if POLICIES[policy].order is not None:
            order = "fcfs"  # its own takes the place of priorities
        config = make_config(
            policy,
            num_blocks=num_blocks,
            scheduling_policy=order,
            enable_prefix_caching=prefix,
            max_num_queued_reqs=max_requests,
            max_num_queued_tokens=max_tokens,
            num_micro_batches=depth if is_pipeline and draft_length is None else 1,
            speculation=draft_length
            and SpeculationConfig(num_speculative_tokens=4, draft_length=draft_length),
        )
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name, "run.gz")
        self.run_ = start_run(self.path, config, depth=depth, model=step_time_model())
        self.num_requests = 0

    @rule(
        num_prompt=st.integers(1, 200),
        max_tokens=st.integers(1, 80),
        priority=st.integers(-2, 2),
        first_token=st.integers(0, 1),
        salt=st.sampled_from([None, "a"]),
        stop=st.integers(0, 280),
        slo=st.sampled_from([None, SLO(ttft=0.3, tbt=0.15), SLO(ttft=2.0), SLO(tbt=0.2), SLO(e2e=5.0)]),
        weight=st.sampled_from([1.0, 4.0]),
        tenant=st.sampled_from([None, "one", "two"]),
        shed=st.sampled_from(ShedMode),
        num_sent=st.just(0) | st.integers(0, 79),
        first_age=st.none() | st.floats(0.0, 1.0),
        kind=st.sampled_from([None, None, "last", "mean", "scored", "guided"]),
        kept_for=st.sampled_from([0.0, 2.0]),
    )
    def arrive(
        self,
        num_prompt,
        max_tokens,
        priority,
        first_token,
        salt,
        stop,
        slo,
        weight,
        tenant,
        shed,
        num_sent,
        first_age,
        kind,
        kept_for,
    ):
        is_pooled = kind in ("last", "mean")
        max_tokens = 1 if is_pooled else max_tokens
        num_sent = min(num_sent, max_tokens - 1, 255 - num_prompt)
        self.run_.add(
            Request(
                request_id=f"r{self.num_requests}",
                prompt_token_ids=tuple(range(first_token, first_token + num_prompt)),
                resumed_token_ids=tuple(range(num_prompt, num_prompt + num_sent)),
                first_token_time=None if first_age is None else self.run_.now - first_age,
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    stop_token_ids=(stop,),
                    grammar=UNKNOWN_GRAMMAR if kind == "guided" else None,
                ),
                pooling=kind if is_pooled else None,
                num_prompt_logprobs=0 if kind == "scored" else None,
                kept_for=kept_for,
                arrival=self.run_.now,
                priority=priority,
                cache_salt=salt,
                slo=slo,
                slo_class=None if slo is None else "some",
                weight=weight,
                tenant=tenant,
                shed=shed,
            )
        )
        self.num_requests += 1

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        if self.run_.open:
            self.run_.abort(pick.choice(list(self.run_.open)), "unknown")

    @rule(pick=st.randoms(use_true_random=False))
    def fail(self, pick):
        if self.run_.open:
            self.run_.failing.add(pick.choice(list(self.run_.open)))

    @rule(
        pick=st.randoms(use_true_random=False),
        verb=st.sampled_from(
            ["hold", "unhold", "reserve", "release", "detach", "detach", "reattach", "adopt", "adopt"]
        ),
    )
    def hand_over(self, pick, verb):
        self.run_.hand_over(pick, verb)

    @rule(count=st.integers(1, 12))
    def run_steps(self, count):
        for _ in range(count):
            self.run_.step()

    def teardown(self):
        if not hasattr(self, "run_"):
            return
        with self.directory:
            self.check()

    def check(self):
        self.run_.finish()
        recording = Recording(self.path)
        replay = Replay(recording, step_time_model())
        result = replay.run()
        assert result.difference is None
        assert result.num_steps == len(self.run_.steps) == recording.num_steps
        assert result.num_calls == recording.num_calls
        assert result.num_requests == self.num_requests + self.run_.num_adopted
        assert result.num_rows == sum(len(step.rows) for step in self.run_.steps)
        reasons = list(self.run_.finished.values())
        assert result.num_aborted == reasons.count(FinishReason.ABORT)
        assert result.num_failed == reasons.count(FinishReason.ERROR)
        assert result.num_expired == reasons.count(FinishReason.EXPIRED)
        assert result.num_rejected == len(self.run_.refused)
        assert len(reasons) + len(self.run_.refused) == self.num_requests
        scheduler = self.run_.scheduler
        scheduler.check_invariants()
        assert replay.scheduler.table.num_preemptions == scheduler.table.num_preemptions
        assert replay.scheduler.table.num_prefix_hits == scheduler.table.num_prefix_hits
        history = read_history(recording)
        assert [step.shape for step in history.steps] == [step.shape for step in self.run_.steps]
        delivered = Counter()
        for item in history.requests:
            delivered[item.record.request_id] += item.record.num_output_tokens
        assert delivered == self.run_.delivered
        ends = {item.record.request_id: item.record.finish_reason for item in history.requests}
        assert {name: ends[name] for name in reasons_by_id(self.run_)} == reasons_by_id(self.run_)
        if not self.run_.num_adopted:  # who moves takes the count along
            assert (
                sum(item.record.num_preemptions for item in history.requests)
                <= scheduler.table.num_preemptions
            )
        # A request's release is told with the next step, which may never come.
        assert len(self.run_.writer._open) <= scheduler.config.max_num_seqs


def test_a_request_that_comes_back_while_prompts_run_is_admitted_without_a_row(tmp_path: Path) -> None:
    path, pick = tmp_path / "run.gz", Random(0)
    run = start_run(path, make_config("prefill-first", num_blocks=64))
    run.add(make_request("r0", 20, 40, arrival=run.now))
    for _ in range(3):
        run.step()
    while not run.detached:
        run.hand_over(pick, "detach")
    run.add(make_request("r1", 20, 2, arrival=run.now))
    while run.detached:
        run.hand_over(pick, "reattach")
    run.finish()
    recording = Recording(path)
    back = [call for call in recording.calls() if isinstance(call, ScheduleCall) and call.admitted][1]
    assert [each.request for each in back.admitted] == [0, 1]
    assert [row.request for row in back.rows] == [1]
    assert Replay(recording, None).run().difference is None
    assert [item.record.num_preemptions for item in read_history(recording).requests] == [0, 0]


TestRecordedMachine = RecordedMachine.TestCase
TestRecordedMachine.settings = examples(120, stateful_step_count=30)
