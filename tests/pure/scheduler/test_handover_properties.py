"""Whatever happens to requests that move between two replicas, each token comes once, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onbeat.core.errors import InvalidRequest
from onbeat.core.handover import Detached
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO
from onbeat.scheduler.scheduler_config import SpeculationConfig
from tests.examples import examples
from tests.pure.scheduler.driver import POLICY_NAMES, make_config, make_request
from tests.pure.scheduler.moving import Replica, expected
from tests.pure.scheduler.test_properties import WINDOWS

PICK = st.randoms(use_true_random=False)


class MovingMachine(RuleBasedStateMachine):
    """Requests arrive at either replica and are moved stage by stage, or not; leases end, memory runs out."""

    @initialize(
        policies=st.tuples(st.sampled_from(POLICY_NAMES), st.sampled_from(POLICY_NAMES)),
        depths=st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 3])),
        is_pipeline=st.booleans(),
        num_blocks=st.tuples(st.integers(16, 40), st.integers(16, 40)),
        prefix=st.booleans(),
        drafts=st.sampled_from([None, "fixed"]),
        num_snapshots=st.sampled_from([None, 1, 3]),
        windows=WINDOWS,
    )
    def start(self, policies, depths, is_pipeline, num_blocks, prefix, drafts, num_snapshots, windows):
        self.replicas = []
        for name, policy, depth, blocks in zip("SD", policies, depths, num_blocks, strict=True):
            num_micro_batches = depth if is_pipeline and drafts is None else 1
            config = make_config(
                policy,
                num_blocks=blocks,
                enable_prefix_caching=prefix,
                num_snapshots=num_snapshots if drafts is None else None,
                num_micro_batches=num_micro_batches,
                num_tables=windows[0],
                window_length=windows[1],
                speculation=drafts and SpeculationConfig(num_speculative_tokens=3, draft_length=drafts),
            )
            self.replicas.append(Replica(name, config, depth=depth))
        self.requests = {}
        self.at: dict[str, int] = {}
        """Which replica a request is with; of one that is on its way, the one that it leaves."""
        self.copied: dict[str, int] = {}
        """Blocks of a move's destination that have been filled."""
        self.asked: set[str] = set()
        self.detached: dict[str, Detached] = {}
        self.aborted: set[str] = set()

    def pair(self, request_id):
        source = self.at[request_id]
        return self.replicas[source], self.replicas[1 - source]

    def open(self):
        return [name for name in self.requests if name not in self.replicas[self.at[name]].finished]

    def take_answers(self):
        for replica in self.replicas:
            for request_id, detached in replica.scheduler.handover.take_detached():
                self.asked.remove(request_id)
                if detached is None:
                    self.give_up(request_id)
                else:
                    assert list(detached.output_token_ids) == replica.outputs[request_id]
                    self.detached[request_id] = detached

    def pull(self, request_id, block_ids, first):
        source, destination = self.pair(request_id)
        destination.pull(source, request_id, block_ids, first)
        self.take_answers()  # of steps that came back meanwhile

    def give_up(self, request_id):
        self.pair(request_id)[1].release(request_id)
        self.copied.pop(request_id, None)

    @rule(
        where=st.integers(0, 1),
        num_prompt=st.integers(1, 120),
        max_tokens=st.integers(1, 60),
        shared=st.booleans(),
        slo=st.sampled_from([None, SLO(ttft=20.0, tbt=2.0), SLO(e2e=60.0)]),
        kept_for=st.sampled_from([0.0, 30.0]),
        is_scored=st.sampled_from([False, False, True]),
    )
    def arrive(self, where, num_prompt, max_tokens, shared, slo, kept_for, is_scored):
        request_id = f"r{len(self.requests)}"
        replica = self.replicas[where]
        request = make_request(
            request_id,
            num_prompt,
            max_tokens,
            arrival=replica.now,
            salt="shared" if shared else request_id,
            slo=slo,
            kept_for=kept_for,
            num_prompt_logprobs=0 if is_scored else None,
        )
        replica.add(request)
        self.requests[request_id] = request
        self.at[request_id] = where

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def hold(self, pick):
        request_id = pick.choice(sorted(self.requests))
        replica = pick.choice(self.replicas)
        held = replica.scheduler.handover.hold(request_id, replica.now + 40)
        if held is not None:
            assert len(held) == len(set(held))

    @precondition(lambda self: self.open())
    @rule(pick=PICK, num_more=st.integers(0, 40))
    def copy(self, pick, num_more):
        """Reserve at the destination, hold at the source, and copy what is full."""
        request_id = pick.choice(sorted(self.open()))
        source, destination = self.pair(request_id)
        if request_id in self.detached or request_id in self.asked:
            return
        held = source.scheduler.handover.hold(request_id, source.now + 40)
        num_tokens = (0 if held is None else len(held) * 16) + num_more
        if not destination.reserve(request_id, num_tokens) or held is None:
            return
        first = self.copied.get(request_id, 0)
        self.pull(request_id, held[first:], first)
        self.copied[request_id] = max(first, len(held))

    @precondition(lambda self: self.open())
    @rule(pick=PICK)
    def detach(self, pick):
        request_id = pick.choice(sorted(self.open()))
        if request_id in self.detached or request_id in self.asked:
            return
        self.asked.add(request_id)
        self.pair(request_id)[0].scheduler.handover.detach(request_id)
        self.take_answers()

    @precondition(lambda self: self.detached)
    @rule(pick=PICK)
    def adopt(self, pick):
        """Copy what is left, let the destination go on, and the source forget; else the source goes on."""
        request_id = pick.choice(sorted(self.detached))
        detached = self.detached.pop(request_id)
        source, destination = self.pair(request_id)
        first = self.copied.pop(request_id, 0)
        request = self.requests[request_id]
        if request_id not in destination.reservations:
            first = 0  # its lease has ended, and with it what was copied
        num_tokens = len(request.prompt_token_ids) + len(detached.output_token_ids)
        if destination.reserve(request_id, num_tokens):
            self.pull(request_id, detached.block_ids[first:], first)
            destination.pull_state(source, request_id)
            if not destination.holds_batches:
                destination.adopt(request, detached)
                source.scheduler.handover.free(request_id)
                self.at[request_id] = 1 - self.at[request_id]
                return
            with pytest.raises(InvalidRequest, match="whole batches"):
                destination.adopt(request, detached)
        destination.release(request_id)
        assert source.scheduler.handover.reattach(request_id)

    @precondition(lambda self: self.detached)
    @rule(pick=PICK)
    def reattach(self, pick):
        request_id = pick.choice(sorted(self.detached))
        del self.detached[request_id]
        assert self.pair(request_id)[0].scheduler.handover.reattach(request_id)
        assert not self.pair(request_id)[0].scheduler.handover.reattach(request_id)
        self.give_up(request_id)

    @precondition(lambda self: self.open())
    @rule(pick=PICK)
    def abort(self, pick):
        request_id = pick.choice(sorted(self.open()))
        self.pair(request_id)[0].abort(request_id)
        self.aborted.add(request_id)
        self.detached.pop(request_id, None)
        self.give_up(request_id)

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def release(self, pick):
        request_id = pick.choice(sorted(self.requests))
        replica = pick.choice(self.replicas)
        replica.scheduler.handover.release_hold(request_id)
        replica.release(request_id)
        self.copied.pop(request_id, None)

    @rule(count=st.integers(1, 8), where=st.integers(0, 1))
    def run_steps(self, count, where):
        for _ in range(count):
            self.replicas[where].step()
            self.take_answers()
        for request_id in self.replicas[where].expire():
            self.copied.pop(request_id, None)

    @invariant()
    def everything_has_one_owner(self):
        for replica in getattr(self, "replicas", ()):
            replica.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "replicas"):
            return
        for replica in self.replicas:
            while replica.in_flight:
                replica.collect()
        self.take_answers()
        assert not self.asked, "nobody answers"
        for request_id in list(self.detached):
            assert self.pair(request_id)[0].scheduler.handover.reattach(request_id)
        for replica in self.replicas:
            self.run_to_end(replica)
            replica.scheduler.check_invariants()
            assert replica.scheduler.kv.pool.num_used_blocks == 0, "blocks leaked"
            assert replica.scheduler.kv.snapshots.num_taken == 0, "places of states leaked"
        for request_id, request in self.requests.items():
            replica = self.replicas[self.at[request_id]]
            tokens, reason = replica.outputs[request_id], replica.finished[request_id]
            assert tokens == expected(request, len(tokens))
            is_aborted = request_id in self.aborted
            assert reason in (
                {FinishReason.ABORT} if is_aborted else {FinishReason.LENGTH, FinishReason.EXPIRED}
            )
            if reason is FinishReason.LENGTH:
                num_prompt = len(request.prompt_token_ids)
                assert len(tokens) == min(request.sampling.max_tokens, 256 - num_prompt)

    def run_to_end(self, replica):
        replica.now += 1000
        replica.expire()
        for _ in range(10_000):
            for request_id in self.requests:
                replica.scheduler.handover.release_hold(request_id)
            if not replica.step():
                return
        raise AssertionError("it does not come to an end")


TestMovingMachine = MovingMachine.TestCase
TestMovingMachine.settings = examples(150, stateful_step_count=40)


def test_a_stream_that_began_before_the_clock_of_its_new_replica_has_run() -> None:
    """Its times are told by the clock of the replica that it is on, and this one's may have begun since."""
    source, destination = (Replica(name, make_config("slo"), depth=1) for name in "sd")
    source.add(make_request("r", 20, 4, slo=SLO(ttft=1.0, tbt=0.1)))
    source.step()
    source.scheduler.handover.detach("r")
    ((_, detached),) = source.scheduler.handover.take_detached()
    assert detached is not None
    assert destination.reserve("r", 40)
    destination.pull(source, "r", detached.block_ids, 0)
    destination.adopt(source.requests["r"], replace(detached, scheduled_time=-400.0))
    destination.run()
    assert destination.finished == {"r": FinishReason.LENGTH}
