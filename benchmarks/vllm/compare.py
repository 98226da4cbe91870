"""onbeat and vLLM together, beside plain vLLM at several token budgets, in interleaved rounds.

    python -m benchmarks.vllm.compare --vllm .vllm/env-0.32.0/bin/vllm --model FOLDER [--quick] [--write]

Every server gets the same prompts: closed loops at several concurrencies, with one long prompt in eight. A
request is good if its first token comes within 1 s and its own P99 gap is within 2.5 times the gap that the
machine has at this concurrency without long prompts, which is measured first. onbeat, as the plug-in and as
the server of vLLM's workers (`--ours`), is held against the budget of vLLM that is best at this concurrency.

All servers stay up, suspended but for the one whose turn it is. Three rounds take an hour on two cores that
have nothing else to do; `--minutes` ends them between two rounds. `--quick` tries it out. `--write` writes
the page under today's date; the runs go to the JSON file beside it.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.pages import REPOSITORY, RESULTS, git_commit, machine, write_document
from benchmarks.serve.peers.client import LoadClient, Objectives
from benchmarks.serve.peers.entries import Entry
from benchmarks.serve.peers.machine import measure_limits
from benchmarks.serve.peers.order import order_of_turns
from benchmarks.serve.peers.rounds import Loads, Runs
from benchmarks.serve.peers.stage import Stage, open_stage
from benchmarks.serve.peers.workload import LONG_SHARE, Cell
from benchmarks.vllm.compare_page import BACKEND, OURS, PLUG_IN, TBT_OVER_GAP, page
from onbeat.core.tokenizer import Tokenizer
from onbeat.text.tokenizer import load_tokenizer

BUDGETS = (128, 256, 512, 2048)
REQUESTS = {8: 80, 16: 120, 32: 160}
"""Concurrency -> requests of a run: about as long each on two cores."""
QUICK = {2: 6}
TTFT = 1.0
KV_GIB = 2
OWN_FLAGS = (
    "--served-model-name default --dtype bfloat16 --host 127.0.0.1 --port {port} --max-model-len 2048 "
    "--max-num-seqs 32"
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
    "VLLM_CPU_OMP_THREADS_BIND": "0-{last_core}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    args = parse_args()
    ours = [OUR_ENTRIES[name](args) for name in args.ours]
    entries = [*ours, *(vllm_entry(args, budget) for budget in args.budgets)]
    cells = [
        Cell(name=f"{level}", concurrency=level, long_share=LONG_SHARE, num_requests=num)
        for level, num in args.requests.items()
    ]
    print(f"results go to {args.stem}", flush=True)
    with open_stage(entries, "auto") as stage:
        campaign = Campaign(stage, load_tokenizer(args.model), [entry.name for entry in entries])
        objectives = campaign.objectives_of(cells, args.tbt_ms)
        for runs, limits in campaign.rounds(cells, objectives, args.rounds, args.minutes * 60):
            document = {
                "at": time.strftime("%Y-%m-%d"),
                "commit": git_commit(),
                "machine": machine(),
                "command": shlex.join(["python", "-m", "benchmarks.vllm.compare", *shown(args)]),
                "objectives": {name: each.tbt * 1e3 for name, each in objectives.items()},
                "ttft_ms": TTFT * 1e3,
                "requests": {cell.name: cell.num_requests for cell in cells},
                "servers": {entry.name: entry.as_json() for entry in entries},
                "limits": limits,
                "runs": runs,
            }
            write_document(document, args.stem, page(document))
    print(page(document))


class Campaign:
    """The servers on their stage, and what they are asked.

    Parameters
    ----------
    names : of the servers; the last is the one that gaps are measured on.
    """

    def __init__(self, stage: Stage, tokenizer: Tokenizer, names: Sequence[str]) -> None:
        self._stage, self._tokenizer, self._names = stage, tokenizer, names
        self._salt = secrets.token_hex(4)
        self._began = time.monotonic()

    def objectives_of(self, cells: Sequence[Cell], given: Mapping[int, float]) -> dict[str, Objectives]:
        """Return what the requests of each load are held to.

        Parameters
        ----------
        given : concurrency -> TBT objective, milliseconds; the others are measured.
        """
        found: dict[str, Objectives] = {}
        for cell in cells:
            tbt = given.get(cell.concurrency)
            if tbt is None:
                tbt = self._gap_ms(cell) * TBT_OVER_GAP
            found[cell.name] = Objectives(ttft=TTFT, tbt=tbt / 1e3)
            print(f"{cell.name}: {found[cell.name]}", flush=True)
        return found

    def rounds(
        self, cells: Sequence[Cell], objectives: Mapping[str, Objectives], num: int, seconds: float
    ) -> Any:
        """Yield all runs and the machine's limits so far, after each round."""
        clients = {
            (cell.name, how): LoadClient(
                self._tokenizer, objectives=objectives[cell.name], send_slo=how, seed=1
            )
            for cell in cells
            for how in ("body", "none")
        }
        runs: Runs = []
        limits = [measure_limits()]
        for index in range(num):
            began = time.monotonic()
            print(f"round {index + 1} of {num}", flush=True)
            turns = order_of_turns(self._names, cells, index, changes_with_load=self._stage.keeps_up)
            for name, loads in turns:
                how = "body" if name in OURS else "none"
                for cell in loads:
                    client = clients[cell.name, how]
                    runs += [
                        run | {"round": index} for run in self._run(name, cell, client, f"round {index}")
                    ]
            limits.append(measure_limits())
            yield runs, limits
            took, gone = time.monotonic() - began, time.monotonic() - self._began
            if index + 1 < num and gone + took > seconds:
                print(f"no time for round {index + 2}: {gone / 60:.0f} minutes are gone", flush=True)
                return

    def _gap_ms(self, cell: Cell) -> float:
        """Return the gap between tokens at a concurrency without long prompts."""
        plain = Cell(
            name=f"{cell.name}, gaps", concurrency=cell.concurrency, num_requests=2 * cell.concurrency
        )
        client = LoadClient(self._tokenizer, objectives=Objectives(), send_slo="none", seed=2)
        (run,) = self._run(self._names[-1], plain, client, "gaps")
        return float(run["p50_itl_ms"])

    def _run(self, name: str, cell: Cell, client: LoadClient, label: str) -> Runs:
        loads = Loads(client=client, cells=[cell], salt=self._salt)
        with self._stage.turn(name) as turn:
            return loads.take_turn(turn, name, [cell], f"{label}/{cell.name}")


def plug_in_entry(args: argparse.Namespace) -> Entry:
    command = f"vllm serve {args.model} --slo-mode gap{_profile(args, '--profile')} -- {_flags(args)}"
    return _our_entry(args, PLUG_IN, "vLLM under onbeat's scheduler", command)


def backend_entry(args: argparse.Namespace) -> Entry:
    command = (
        f"serve {args.model} --backend vllm --slo-mode gap --kv-cache-memory-bytes {KV_GIB * 2**30}"
        f"{_profile(args, '--step-time-profile')} {OWN_FLAGS}"
    )
    return _our_entry(args, BACKEND, "vLLM's workers under onbeat's server", command)


def _profile(args: argparse.Namespace, flag: str) -> str:
    return "" if args.profile is None else f" {flag} {args.profile.absolute()}"


def _our_entry(args: argparse.Namespace, name: str, about: str, command: str) -> Entry:
    return Entry(
        name=name,
        about=about,
        command=f"{args.vllm.with_name('python')} -m onbeat {command}",
        environment=ENVIRONMENT | {"PYTHONPATH": str(REPOSITORY / "src")},
    )


OUR_ENTRIES = {"plug-in": plug_in_entry, "backend": backend_entry}


def vllm_entry(args: argparse.Namespace, budget: int) -> Entry:
    return Entry(
        name=f"vLLM {budget}",
        about=f"plain vLLM, at most {budget} tokens a step",
        command=f"{args.vllm} serve {args.model} {_flags(args)} --max-num-batched-tokens {budget}",
        environment=ENVIRONMENT,
    )


def _flags(args: argparse.Namespace) -> str:
    return f"{OWN_FLAGS} {args.vllm_flags}".strip()


def shown(args: argparse.Namespace) -> list[str]:
    """Return the arguments without paths of this machine."""
    hidden = {
        str(args.out): "OUT",
        str(args.vllm): "VLLM",
        str(args.model): "MODEL",
        str(args.profile): "PROFILE",
    }
    return [hidden.get(each, each) for each in sys.argv[1:]]


def levels(text: str) -> dict[int, float]:
    """Read LEVEL:VALUE,..."""
    pairs = [item.partition(":") for item in text.split(",")]
    return {int(level): float(value) for level, _, value in pairs}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="its command, in an environment of its own")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model")
    parser.add_argument("--profile", type=Path, help="step times that onbeat plans with (default: its own)")
    parser.add_argument(
        "--ours", nargs="+", choices=OUR_ENTRIES, default=[*OUR_ENTRIES], help="of onbeat (default: both)"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="of plain vLLM")
    parser.add_argument("--requests", type=levels, help=f"LEVEL:NUMBER,... of a run (default: {REQUESTS})")
    parser.add_argument("--tbt-ms", type=levels, default={}, help="LEVEL:MS,... (default: measured)")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 3)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins that would end later")
    parser.add_argument(
        "--vllm-flags",
        default="",
        help="more flags of every vllm serve, as one text: --vllm-flags='--enforce-eager'",
    )
    parser.add_argument("--quick", action="store_true", help="one tiny round, to try it out")
    parser.add_argument("--write", action="store_true", help="write the page among the results")
    parser.add_argument(
        "--out", type=Path, default=Path("compare"), help="else it goes to OUT.md and OUT.json"
    )
    args = parser.parse_args()
    args.vllm, args.model = args.vllm.absolute(), args.model.absolute()
    counts = args.requests or (QUICK if args.quick else REQUESTS)
    args.requests = {level: int(num) for level, num in counts.items()}
    args.rounds = args.rounds or (1 if args.quick else 3)
    name = "plugin" if args.ours == ["plug-in"] else "backend"
    args.stem = RESULTS / f"{time.strftime('%Y-%m-%d')}-vllm-{name}" if args.write else args.out
    return args


if __name__ == "__main__":
    main()
