"""Runs planned steps: requests in arrays, one forward pass over the mixed batch, sampling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from onbeat.core.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from onbeat.engine.executor import PendingStep, done_step
from onbeat.engine.forward import ChosenTokens, ForwardPass, LaunchesSteps, StepLogits
from onbeat.engine.guided_draw import Guides, begin_guide, guided_rows
from onbeat.engine.input_batch import InputBatch, IntArray, StepInputs
from onbeat.engine.pooling import pool
from onbeat.engine.prompt_scorer import PromptScorer
from onbeat.engine.sampled import BestTokens, SampledTokens, TokenSampler
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.speculation.proposer import Proposer, num_ready, propose
from onbeat.engine.speculation.verifier import VerifiedTokens, verify
from onbeat.scheduler.scheduler_config import SchedulerConfig


class ModelRunner:
    """Holds the tokens of live requests, and executes steps in the order they were planned.

    The tokens it samples are kept here, so that a step may be planned before the scheduler saw the tokens of
    the step before it.

    Parameters
    ----------
    limits : what a scheduler may plan; KV blocks have the ids 0 to `limits.num_blocks` - 1.
    forward : the model and its KV cache.
    sampler : chooses tokens.
    proposer : makes the drafts of rows that are planned with some; None where none ever is.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        forward: ForwardPass,
        sampler: TokenSampler,
        proposer: Proposer | None = None,
    ) -> None:
        self.limits = limits
        self.forward = forward
        self.sampler = sampler
        self.proposer = proposer
        self.batch = InputBatch(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            tables=(limits.num_tables, limits.num_blocks),
            num_states=limits.num_states if forward.config.state_numbers else 0,
        )
        self.prompts = PromptScorer(self.batch, sampler, forward.config.vocab_size)
        self.guides: Guides | None = None
        """Where guides of grammars come from; set by whoever builds the engine. None: none is enforced."""
        self._launches = forward if isinstance(forward, LaunchesSteps) else None
        self._lock = threading.RLock()
        """Of the batch: one thread launches steps, another takes their tokens. Not held while a step is
        queued, for which only what the first thread changes is read."""
        self._last: _LaunchedStep | None = None
        """The newest step, where it may still run."""
        self._failed_slots: set[int] = set()
        """Slots whose KV may not be finite; it is made so when they are given away."""
        self._to_scrub: list[IntArray] = []
        """Blocks of failed requests that left."""

    @property
    def overlaps(self) -> bool:
        """Whether it takes steps while one runs, so that to plan ahead keeps the device busy."""
        return self._launches is not None and self.proposer is None

    def touch_ahead(self) -> bool:
        """Take a little of the memory that later steps will need; return whether there was any to take."""
        return self.forward.touch_ahead() or (self.proposer is not None and self.proposer.touch_ahead())

    def close(self) -> None:
        """Let go of what steps ran on."""
        if self.proposer is not None:
            self.proposer.close()
        self.forward.close()

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step to its end."""
        return self.launch(scheduled).result()

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Run one step, or queue it behind those under way where the device itself can choose its tokens."""
        with self._lock:
            rows = scheduled.rows
            self._change_requests(scheduled)
            if not rows:
                return done_step(ModelRunnerOutput([]))
            self.batch.take_blocks(rows)
            self.batch.take_pages(scheduled.new_pages)
            inputs = None
            may_launch = self.proposer is None and not self.prompts.has_any(rows)
            if self._launches is not None and may_launch:
                inputs = self.batch.prepare(rows)
            if self._launches is None or inputs is None or inputs.pooled or not self.sampler.trusts_device:
                if self._last is not None:
                    self._last.result()  # what comes now needs the tokens
                    self._last = inputs = None
                return done_step(self._run(scheduled, inputs))
            is_plain = all(row.is_plain for row in inputs.sampling_rows)
        # To queue a step's operators may take as long as the step before it, whose tokens are not to wait.
        chosen = self._launches.launch(inputs, None if is_plain else partial(self._settle, inputs))
        with self._lock:
            self.batch.append_unknown(inputs)
            self._last = _LaunchedStep(chosen, partial(self._finish, scheduled, inputs))
            return self._last

    def _settle(self, inputs: StepInputs) -> None:
        """Take the tokens of the step under way, if those of a step depend on them."""
        if self._last is not None and any(row.needs_output for row in inputs.sampling_rows):
            self._last.result()

    def _finish(
        self, scheduled: SchedulerOutput, inputs: StepInputs, step: _LaunchedStep, chosen: BestTokens
    ) -> ModelRunnerOutput:
        """Take the tokens of a launched step, once; the next one may run already."""
        with self._lock:
            if step.output is not None:
                return step.output
            sampled = self.sampler.sample(None, inputs.sampling_rows, chosen)
            is_here = self.batch.fill(inputs, sampled)
            for index in sampled.errors:
                if is_here[index]:
                    # The step behind may still write what is not finite.
                    self._failed_slots.add(int(inputs.sampling_slots[index]))
                elif (block_ids := step.left_behind.get(inputs.sampling_rows[index])) is not None:
                    self._to_scrub.append(block_ids)
            step.output = self._to_output(scheduled, None, inputs, _of_one_token(sampled))
            return step.output

    def _run(self, scheduled: SchedulerOutput, inputs: StepInputs | None) -> ModelRunnerOutput:
        """Run a step here and now.

        Parameters
        ----------
        inputs : of the step, where they are known.
        """
        drafts = None if self.proposer is None else propose(self.proposer, self.batch, scheduled.rows)
        *earlier, rows = self.prompts.split(scheduled.rows)
        for part in earlier:
            self._forward_pass(part, self.batch.prepare(part), wants_logits=False)
        inputs = inputs or self.batch.prepare(rows, drafts, scheduled.kept_states)
        wants_logits = self.sampler.needs_logits(inputs.sampling_rows)
        logits = self._forward_pass(rows, inputs, wants_logits=wants_logits)
        output = self._take_tokens(scheduled, inputs, drafts, logits, wants_logits=wants_logits)
        return self._take_embeddings(inputs, logits, output) if inputs.pooled else output

    def _take_tokens(
        self,
        scheduled: SchedulerOutput,
        inputs: StepInputs,
        drafts: list[list[int]] | None,
        logits: StepLogits,
        *,
        wants_logits: bool,
    ) -> ModelRunnerOutput:
        """Choose the tokens of the rows that sample."""
        if not inputs.sampling_rows:
            return ModelRunnerOutput([])
        if drafts and any(drafts):
            pairs = zip(drafts, scheduled.rows, strict=True)
            sampling_drafts = [ids for ids, row in pairs if row.samples]
            verified = verify(
                self.sampler, logits, inputs.sampling_rows, sampling_drafts, wants_logits=wants_logits
            )
            self.batch.append_verified(inputs, verified.token_ids)
        else:
            sampled = self.sampler.sample(logits.values_RV, inputs.sampling_rows, logits.best)
            self.batch.append_unknown(inputs)
            self.batch.fill(inputs, sampled)
            verified = _of_one_token(sampled)
        verified.errors |= self.prompts.errors(inputs.sampling_slots)
        for index in verified.errors:
            # Its blocks will be another request's.
            self.forward.scrub(self.batch.block_ids(int(inputs.sampling_slots[index])))
        output = self._to_output(scheduled, drafts, inputs, verified)
        if reports := self.prompts.take_reports(inputs):
            output = output._replace(prompt_logprobs=reports)
        return output

    def _forward_pass(
        self, rows: Sequence[ScheduledRequest], inputs: StepInputs, *, wants_logits: bool
    ) -> StepLogits:
        """Run one pass, score what it has of prompts, and return the logits of the rows that sample."""
        scored = self.prompts.find(rows, inputs)
        if scored is None:
            return self.forward.run(inputs, wants_logits=wants_logits)
        return scored.take(self.forward.run(scored.inputs, wants_logits=True))

    def _take_embeddings(
        self, inputs: StepInputs, logits: StepLogits, output: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """Pool the hidden states of the step, and add what they have come to."""
        found = pool(inputs.pooled, logits.hidden_PD)
        for request_id in found.failed:
            self.forward.scrub(self.batch.block_ids(self.batch.slots[request_id]))
        failed = {**(output.failed or {}), **found.failed}
        return output._replace(embeddings=found.done, failed=failed or None)

    def _change_requests(self, scheduled: SchedulerOutput) -> None:
        """Forget the requests that left, then take in those that came."""
        for request_id in scheduled.released_ids:
            self._release(request_id)
        while self._to_scrub:  # which fails where memory is short; nobody is half forgotten then
            self.forward.scrub(self._to_scrub[-1])
            self._to_scrub.pop()
        slots = [self.batch.admit(admitted) for admitted in scheduled.admitted]
        for admitted, slot in zip(scheduled.admitted, slots, strict=True):
            if admitted.snapshot is not None:
                self.forward.copy_state(self.limits.max_num_seqs + admitted.snapshot, slot)
        self.prompts.admit(scheduled.admitted, slots)
        if self.batch.num_guided:
            for slot in slots:
                begin_guide(self.batch.sampling_rows[slot], self.guides)

    def _release(self, request_id: str) -> None:
        batch = self.batch
        slot = batch.slots.get(request_id)
        if slot is None:
            return
        if slot in self._failed_slots:
            self._failed_slots.remove(slot)
            self._to_scrub.append(batch.block_ids(slot))  # which will be another request's
        elif self._last is not None and not self._last.done():
            self._last.left_behind[batch.sampling_rows[slot]] = batch.block_ids(slot)
        batch.release(request_id)
        self.prompts.release(slot)
        if self.proposer is not None:
            self.proposer.release(slot)

    def _to_output(
        self,
        scheduled: SchedulerOutput,
        drafts: list[list[int]] | None,
        inputs: StepInputs,
        verified: VerifiedTokens,
    ) -> ModelRunnerOutput:
        token_ids, errors = verified.token_ids, verified.errors
        logprobs = verified.logprobs if any(verified.logprobs) else None
        num_drafted = failed = None
        if drafts:
            num_drafted = [len(ids) for ids, row in zip(drafts, scheduled.rows, strict=True) if row.samples]
        num_available = None if self.proposer is None else num_ready(self.proposer, self.batch, inputs)
        guided, request_ids = None, inputs.sampling_request_ids
        if verified.guides is not None:
            guided = guided_rows(inputs.sampling_rows, request_ids, verified.guides)
        if errors:
            token_ids = [[] if index in errors else ids for index, ids in enumerate(token_ids)]
            failed = {request_ids[index]: message for index, message in errors.items()}
            if guided is not None:
                failed = {name: message for name, message in failed.items() if name not in guided.faults}
        return ModelRunnerOutput(
            token_ids, logprobs, failed or None, num_drafted, num_available, guided=guided
        )


@dataclass(slots=True)
class _LaunchedStep:
    """A step under way.

    Parameters
    ----------
    chosen : its tokens.
    finish : given this step and the tokens, returns what the scheduler is told; takes them only once.
    """

    chosen: ChosenTokens
    finish: Callable[[_LaunchedStep, BestTokens], ModelRunnerOutput]
    output: ModelRunnerOutput | None = None
    left_behind: dict[SamplingRow, IntArray] = field(default_factory=dict)
    """KV blocks of the rows that were released meanwhile."""

    def done(self) -> bool:
        """Return whether its tokens were taken."""
        return self.output is not None

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and take its tokens."""
        return self.output or self.finish(self, self.chosen.wait())


def _of_one_token(sampled: SampledTokens) -> VerifiedTokens:
    """Return what was sampled for rows without drafts."""
    return VerifiedTokens(
        [[token_id] for token_id in sampled.token_ids],
        [None if entry is None else [entry] for entry in sampled.logprobs] if any(sampled.logprobs) else [],
        sampled.errors,
        sampled.guides,
    )
