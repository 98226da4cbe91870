"""How much code one call runs through: functions and files of `src/onbeat`, for calls that a reader follows.

    python -m benchmarks.check.paths [--files] [--policies sarathi slo]

`add`, `add reject`: a prompt arrives beside 32 streams and 7 prompts, and may be late, or asks to be rejected
then. `schedule`: a step of these 32 streams and 8 prompts. `request`: one request of 256 tokens in and 8 out,
from a load to its record, behind one replica; model and device are known by then. `arguments`: from the flags
of `onbeat simulate`, parsed, to all that is simulated, with no name left, and its load. Its walk is told too:
the files in the order in which functions are entered for the first time. A stay lasts while they are of one
file; a return is a stay in a file that had been left. The same is told of the functions that are handed what
was asked: the parsed flags, an object of settings, or a word or path among their values. The others compute
with what is already known: sizes of the model, step times, lengths. A function counts once, however often it
is called; comprehensions, lambdas and what `dataclass` makes do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import onbeat
from onbeat.cli.args import parse
from onbeat.cli.main import build_parser
from onbeat.cli.simulate import asked_of
from onbeat.core.options import make, settings_of, values_of
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.core.step import ModelRunnerOutput
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve, resolve_for
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import make_scheduler
from onbeat.workload.load import Load

SOURCES = f"{Path(onbeat.__file__).parent}/"
NUM_STREAMS, NUM_PROMPTS = 32, 8
MODEL, DEVICE = "mistralai/Mistral-7B-v0.3", "h100-sxm"
NAMES = {"model": MODEL, "device": DEVICE}


def follow(call: Callable[[], Any], counts: Callable[[FrameType], bool] = lambda _frame: True) -> list[str]:
    """Make a call, and return the file of each function that it ran through, by their first calls.

    Parameters
    ----------
    counts : whether a call is one of those that are asked for.
    """
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES) and counts(frame):
            codes[frame.f_code] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    named = [code for code in codes if not code.co_name.startswith("<")]
    return [code.co_filename.removeprefix(SOURCES) for code in named]


def walk(files: list[str]) -> tuple[int, int]:
    """Return the stays in files, and how many of them are returns."""
    stays = [name for name, _ in groupby(files)]
    return len(stays), len(stays) - len(set(stays))


def replica_calls(policy: str, model: StepTimeModel) -> dict[str, list[str]]:
    config = SchedulerConfig(
        num_blocks=4096, max_num_seqs=64, max_model_len=2048, max_num_batched_tokens=2048, policy=policy
    )
    scheduler = make_scheduler(config, model)
    now = 0.0
    for index in range(NUM_STREAMS):
        scheduler.add(make_request(index, now), now)
        now = run_step(scheduler, model, now)
    for index in range(NUM_STREAMS, NUM_STREAMS + NUM_PROMPTS - 1):
        scheduler.add(make_request(index, now), now)
    counts = {}
    for name, shed in (("add reject", ShedMode.REJECT), ("add", ShedMode.OFF)):
        scheduler.abort(["r99"])
        counts[name] = follow(partial(scheduler.add, make_request(99, now, shed), now))
    assert (len(scheduler.running), len(scheduler.waiting)) == (NUM_STREAMS, NUM_PROMPTS)
    return {**counts, "schedule": follow(lambda: scheduler.schedule(now))}


def make_request(index: int, now: float, shed: ShedMode = ShedMode.OFF) -> Request:
    return Request(
        request_id=f"r{index}",
        prompt_token_ids=tuple(range(1000 * index, 1000 * index + 256)),
        sampling=SamplingParams(max_tokens=500),
        arrival=now,
        slo=SLO(ttft=2.0, tbt=0.1),
        shed=shed,
    )


def run_step(scheduler: Scheduler, model: StepTimeModel, now: float) -> float:
    step = scheduler.schedule(now)
    assert step is not None
    end = now + model.step_time(step.shape)
    scheduler.update(step, ModelRunnerOutput([[7] for row in step.rows if row.samples]), end)
    return end


def one_request(settings: Deployment) -> list[str]:
    load = onbeat.Load(input_len=256, output_len=8, request_rate=1.0, num_prompts=1).offered()
    simulation, offered = resolve_for(settings, load, ())
    simulate(offered, simulation.config, simulation.step_time)  # imports what it needs
    return follow(lambda: simulate(offered, simulation.config, simulation.step_time))


def arguments(policy: str, *, handed: bool = False) -> list[str]:
    """Return the files of functions from parsed flags to a simulation, or of those that are handed some."""
    command = ["simulate", *chain(*((f"--{name}", word) for name, word in NAMES.items()))]
    command += ["--policy", policy, "--max-model-len", "8192"]
    command += ["--request-rate", "4", "--slo-ttft-ms", "500", "--slo-tbt-ms", "50"]
    args = parse(build_parser(command), command)
    asked_of(args)  # imports what it needs
    declared = chain(
        vars(args).values(), *(values_of(each).values() for each in (make(Deployment, **NAMES), Load()))
    )
    words = {str(value) for value in declared if isinstance(value, (str, Path))}

    def is_handed(frame: FrameType) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(was_asked(frame.f_locals.get(name), words) for name in names)

    return follow(lambda: asked_of(args), *([is_handed] if handed else []))


def was_asked(value: object, words: set[str]) -> bool:
    if isinstance(value, (str, Path)):
        return str(value) in words
    has_settings = is_dataclass(value) and not isinstance(value, type) and settings_of(type(value))
    return bool(has_settings) or isinstance(value, argparse.Namespace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="each file, with its functions")
    parser.add_argument("--policies", nargs="+", default=["sarathi", "slo"])
    args = parser.parse_args()
    for policy in args.policies:
        settings = make(Deployment, **NAMES, policy=policy)
        found = replica_calls(policy, resolve(settings).step_time)
        found |= {"request": one_request(settings), "arguments": arguments(policy)}
        found["arguments handed"] = arguments(policy, handed=True)
        for name, files in found.items():
            functions = Counter(files)
            stays, returns = walk(files)
            way = f"; {stays} stays, {returns} of them returns" if name.startswith("arguments") else ""
            print(f"{policy} {name}: {len(files)} functions in {len(functions)} files{way}")
            for path in sorted(functions) if args.files else ():
                print(f"    {functions[path]:3} {path}")


if __name__ == "__main__":
    main()
