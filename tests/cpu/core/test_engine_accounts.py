"""Whatever comes while steps are under way, every request ends exactly once."""

from __future__ import annotations

from concurrent.futures import Future

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from onbeat.core.errors import Overloaded, SLOUnattainable
from onbeat.core.protocols import StepOutputs
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput
from onbeat.engine.core import EngineCore
from onbeat.perfmodel.predictor import Predictor, ResidualModel
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from tests.examples import examples
from tests.fake_runner import FakeRunner

STEP_SECONDS = 0.1


class HeldSteps:
    """An executor whose steps end when they are told to."""

    def __init__(self):
        self._runner = FakeRunner()
        self._held: list[tuple[Future[ModelRunnerOutput], SchedulerOutput]] = []

    def submit(self, scheduled: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        self._held.append((future, scheduled))
        return future

    def end_oldest(self) -> None:
        future, scheduled = self._held.pop(0)
        future.set_result(self._runner.execute(scheduled))

    def shutdown(self) -> None:
        assert not self._held


class EngineMachine(RuleBasedStateMachine):
    """Arrivals and aborts at any moment between the launch and the end of a step."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        depth=st.sampled_from([1, 2]),
        max_requests=st.sampled_from([None, 3]),
        num_blocks=st.integers(16, 40),
    )
    def start(self, policy, depth, max_requests, num_blocks):
        budget = 256 if POLICIES[policy].whole_prompts else 48
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            policy=policy,
            max_num_queued_reqs=max_requests,
        )
        model = Predictor(
            lambda shape: 0.05 + 1e-3 * shape.num_new_tokens, ResidualModel.log_normal(0.1)
        ).with_learning()
        self.now = 0.0
        self.executor = HeldSteps()
        self.core = EngineCore(
            Scheduler(config, model), self.executor, max_in_flight_steps=depth, clock=lambda: self.now
        )
        self.open: set[str] = set()
        self.ends: dict[str, str] = {}
        self.num_requests = 0

    @rule(
        num_prompt=st.integers(1, 150),
        max_tokens=st.integers(1, 60),
        ttft=st.sampled_from([None, 0.2, 1.0]),
        shed=st.sampled_from(ShedMode),
    )
    def arrive(self, num_prompt, max_tokens, ttft, shed):
        name = f"r{self.num_requests}"
        self.num_requests += 1
        request = Request(
            request_id=name,
            prompt_token_ids=range(num_prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            arrival=self.now,
            slo=None if ttft is None else SLO(ttft=ttft, tbt=0.3),
            shed=shed,
        )
        try:
            self.core.add(request)
        except (Overloaded, SLOUnattainable) as error:
            self.ends[name] = str(error.code)
        else:
            self.open.add(name)

    @rule(pick=st.randoms(use_true_random=False))
    def abort(self, pick):
        if self.open:
            name = pick.choice(sorted(self.open))
            self.take(StepOutputs(self.now, self.core.abort([name, "unknown"])))
            assert self.ends[name] == "abort"

    @rule()
    def launch(self):
        self.core.launch()
        self.take(self.core.take_news())

    @precondition(lambda self: self.core.oldest_step is not None)
    @rule()
    def collect(self):
        self.now += STEP_SECONDS
        self.executor.end_oldest()
        self.take(self.core.collect())

    @rule(seconds=st.floats(0.01, 2.0))
    def wait(self, seconds):
        self.now += seconds

    def take(self, message):
        for output in message.outputs if message is not None else ():
            assert output.request_id in self.open, "an output after the end"
            if output.finish_reason is not None:
                self.open.remove(output.request_id)
                self.ends[output.request_id] = output.finish_reason.value

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.launch()
            if self.core.oldest_step is not None:
                self.collect()
        assert not self.open
        assert len(self.ends) == self.num_requests
        self.core.scheduler.check_invariants()
        assert self.core.scheduler.kv.pool.num_used_blocks == 0
        self.core.shutdown()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = examples(80, stateful_step_count=40)
