"""What long steps are worth on devices where a step costs something for having prompts in it.

    python benchmarks/slo_long_steps.py [--write]

An engine that takes quantized weights apart before it multiplies a prompt's rows by them, as the native
CPU engine does with AMX, spends a time on prompts that neither tokens nor decodes explain. The device here
takes 1 ms a step, 0.15 ms a token of a prompt, 0.9 ms a decode and 0.2 us a cached token, about what two
cores of an Intel with AMX were seen to, with noise of 15 %; what varies is what prompts cost beside that.
Capacities on loads that last, as `slo_study.py` has them: of the policy, of the policy without long steps,
of token budgets.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from harness.pages import markdown_table, publish
from rich.progress import track
from slo_study.ablation import VARIANTS
from slo_study.cells import OBJECTIVES, split_policy
from slo_study.search import find_capacity
from slo_study.trial import Question, Runner

from onbeat.core.options import make
from onbeat.perfmodel.nnls import FEATURES, PAIRS, PASSES, NNLSForm
from onbeat.perfmodel.predictor import Predictor
from onbeat.perfmodel.residual import ResidualModel
from onbeat.simulator.settings import ReplicaSettings

WORKLOAD = "short-answers"
SLO_NAME = "1s-50ms"
BESIDE = (0.0, 2.5e-3, 5e-3, 10e-3)
"""Seconds that a step costs for having prompts in it."""
WITHOUT = "slo/no-long-steps"
assert WITHOUT in VARIANTS  # which stand among the policies once they are imported
POLICIES = ("slo", WITHOUT, "sarathi-256", "sarathi-512")
CRITERIA = ("90 %", "99 %")
NOISE = 0.15
MAX_MODEL_LEN = 4096


def make_runner(policy: str, beside: float) -> Runner:
    """Return what runs a policy on a device."""
    name, budget = split_policy(policy)
    settings = make(
        ReplicaSettings,
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        device="l4",  # names one; the steps' times are this script's
        policy=name,
        max_num_batched_tokens=budget,
        max_num_seqs=32,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=8192,
        max_queue_seconds=0.0,
        step_noise=NOISE,
    )
    runner = Runner(settings, WORKLOAD, MAX_MODEL_LEN)
    costs = dict.fromkeys((*FEATURES, PAIRS, *PASSES, "lowest"), 0.0)
    costs |= {"fixed": 1e-3, "num_new_tokens": 0.15e-3, "num_sequences": 0.75e-3, "has_chunks": beside}
    costs |= {"decode_context_tokens": 0.2e-6, "chunk_cached_tokens": 0.2e-6}
    model = Predictor(NNLSForm().closure(costs), ResidualModel.log_normal(NOISE))
    runner.simulation = replace(runner.simulation, step_time=model)
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the page of results")
    args = parser.parse_args()
    rows = []
    for beside in track(BESIDE, description="capacities"):
        for criterion in CRITERIA:
            found: dict[str, float] = {}
            for policy in POLICIES:
                start = max(found.values(), default=4.0) or 4.0
                runner = make_runner(policy, beside)
                found[policy] = find_capacity(runner, Question(SLO_NAME, "stream"), criterion, start=start)
            best = max(found[policy] for policy in POLICIES if policy.startswith("sarathi"))
            over = [f"{found['slo'] / each:.2f}" if each else "-" for each in (found[WITHOUT], best)]
            rows.append([f"{beside * 1e3:g}", criterion, *found.values(), *over])
    header = ["beside prompts, ms", "attainment", *POLICIES, "over none", "over budgets"]
    title = "Long steps where prompts cost something beside their work"
    objectives = ", ".join(str(each.slo) for each in OBJECTIVES[SLO_NAME])
    what_it_is = f"Capacity, requests per second; {WORKLOAD}, one seed; {objectives}."
    text = f"{what_it_is}\n\n{markdown_table(header, rows)}"
    what = "\n".join((__doc__ or "").split("\n")[3:])
    command = "`python benchmarks/slo_long_steps.py`"
    publish(f"# {title}\n\n{command}\n{what}\n{text}\n", "long-steps", write=args.write)


if __name__ == "__main__":
    main()
