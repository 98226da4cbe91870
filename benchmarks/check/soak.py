"""A million requests through the real server, in all policies and options in turn: nothing is lost or leaked.

    python -m benchmarks.check.soak [--requests 1000000] [--concurrency 64] [--only slo,sarathi] [--json FILE]
    python -m benchmarks.check.soak --only front-ends --concurrency 8 --pause 0.1 --json FILE

A tiny model with random weights and a KV cache so small that requests are preempted. Requests are mixed at
random: in one piece or as streams, several choices, objectives with and without refusals, priorities, drawn
or greedy, wrong ones, and clients that leave before or during the answer. Checked: each request that its
client waited for has one outcome of those that it may have, and all its tokens; greedy answers are those of
the same prompt before; when all is done, nothing runs, waits or holds a block, there are as many connections
and threads as at the start, and resident memory has not grown by more than 1 MB for each 100,000 requests
(judged of a configuration that has 100,000: the default one gets half of all).

In `front-ends` the server has two of them and stand-in engines, and every `--fault-every` seconds something
of it is killed, stopped or replaced. Requests that break with a front end that was killed are counted apart.
One front end, one engine and the keeper survive the last four fifths of each 250,000 requests, so that their
memory can be judged.

With `--json` a run that was ended (SIGINT, SIGTERM) goes on from its file. Exit code 1 where anything of that
fails. A short form is in the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.fleet.disturbed import disturbed
from benchmarks.fleet.kill import MODEL, TOKENIZER, Processes, deployed, new_session
from tests.cpu.e2e.tiny_directory import write_tiny_directory

FIXED_DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "draft_length": "fixed"}'
FRONT_ENDS = "front-ends"
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "slo": (),
    "slo-gap-async": ("--slo-mode", "gap", "--async-scheduling"),
    "slo-reject": ("--shed", "reject", "--shed-order", "longest-wait"),
    "slo-drafts": ("--speculative-config", '{"method": "ngram"}'),
    "slo-uncached": ("--no-enable-prefix-caching",),
    "slo-bounded": ("--max-num-queued-reqs", "8"),
    "sarathi-priority": ("--policy", "sarathi", "--scheduling-policy", "priority"),
    "sarathi-drafts-async": (
        "--policy",
        "sarathi",
        "--async-scheduling",
        "--speculative-config",
        FIXED_DRAFTS,
    ),
    "prefill-first": ("--policy", "prefill-first"),
    "orca": ("--policy", "orca"),
    "static": ("--policy", "static"),
    "edf": ("--policy", "edf"),
    "slo-states": ("--kv-cache-memory-bytes", "600K"),
    FRONT_ENDS: (
        *("--tokenizer", str(TOKENIZER), "--load-format", "stand-in", "--device", "h100-sxm"),
        *("--kv-cache-memory-bytes", "400M", "--front-ends", "2", "--replicas", "2"),
    ),
}
"""Name -> flags."""
MODELS: dict[str, dict[str, Any]] = {
    "slo-states": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
}
"""Changes of the tiny model's configuration; here three of four layers keep a state of each request."""
SMALL = (
    *("--max-model-len", "512", "--kv-cache-memory-bytes", "200K"),
    *("--max-num-seqs", "32", "--no-log-requests"),
)
COMPUTED = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1")
"""Unless engines are stand-ins."""
NUM_PROMPTS = 64
"""Different ones, so that answers can be compared with those before."""
MOST_SLOPE = 1.0
"""MB of resident memory for each 100,000 requests, where many were sent."""
MANY = 100_000
"""Requests from which memory is judged: with fewer the windows of the metrics have only just filled up."""
LONGEST = "slo"
"""The configuration that gets half of all requests, so that the slope of its memory can be told."""
WARM_SHARE = 0.5
"""Of a configuration's requests, before which memory does not count: windows of the metrics fill up."""
_PATIENCE_SECONDS = 300.0


@dataclass(slots=True)
class Report:
    """What came of one configuration, in all of its runs."""

    name: str
    num_done: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    disturbed: dict[str, int] = field(default_factory=dict)
    """How often what was done to the server."""
    memory: dict[str, float] = field(default_factory=dict)
    """Process -> MB for each 100,000 requests."""
    seconds: float = 0.0
    preempted: float = 0.0
    hits: float = 0.0
    """Prompt tokens found in the prefix cache."""
    samples: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Requests done, and the resident megabytes of each process."""

    def count(self, outcome: str) -> None:
        """Count a request."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def fault(self, text: str) -> None:
        """Note what is wrong; the first ones tell enough."""
        if len(self.faults) < 20:
            self.faults.append(text)


@dataclass(frozen=True, slots=True)
class Client:
    """What one client does."""

    body: dict[str, Any]
    may_be: frozenset[int]
    """Statuses that are right."""
    prompt: int
    """Index of the prompt; -1 where the answer is not compared."""
    leaves_after: float | None
    """Seconds, None where it waits for the end."""


def make_client(
    dice: random.Random, prompts: Sequence[list[int]], *, with_priority: bool, is_strict: bool
) -> Client:
    """Draw what a client does.

    Parameters
    ----------
    is_strict : whether the server refuses requests that slow down those that it has accepted.
    """
    index = dice.randrange(len(prompts))
    body: dict[str, Any] = {
        "prompt": prompts[index],
        "max_tokens": dice.choice((1, 4, 8, 16, 40)),
        "ignore_eos": True,
        "temperature": 0,
        "stream": dice.random() < 0.5,
    }
    may_be = {200, 429, 503} if is_strict else {200, 503}
    is_compared = True
    if dice.random() < 0.1:
        body["n"] = dice.choice((2, 4))
        is_compared = False
    if dice.random() < 0.2:
        body |= {"temperature": 1.0, "seed": dice.randrange(1000)}
        is_compared = False
    if dice.random() < 0.4:
        limits = {"ttft_ms": dice.choice((5, 50, 500, 5000)), "tbt_ms": dice.choice((5, 50, 500))}
        body["slo"] = {**limits, "shed": dice.random() < 0.5}
        may_be |= {429, 504}
    if with_priority:
        body["priority"] = dice.randrange(-2, 3)
    if dice.random() < 0.03:
        body |= dice.choice(({"max_tokens": -1}, {"temperature": 9}, {"prompt": []}, {"max_tokenz": 4}))
        may_be, is_compared = {400}, False
    leaves_after = dice.choice((0.0, 0.001, 0.01, 0.05, 0.2)) if dice.random() < 0.15 else None
    return Client(body, frozenset(may_be), index if is_compared else -1, leaves_after)


class Soak:
    """Sends the requests of one configuration and checks what comes back."""

    def __init__(
        self,
        processes: Processes,
        report: Report,
        args: argparse.Namespace,
        *,
        with_priority: bool,
        is_strict: bool,
    ) -> None:
        self._processes, self._url = processes, processes.server.url
        self._report = report
        self._pause = args.pause
        self.is_over = False
        self._with_priority = with_priority
        self._is_strict = is_strict
        self._dice = random.Random(f"{args.seed}/{report.num_done}")
        self._prompts = [
            [self._dice.randrange(256) for _ in range(self._dice.choice((1, 5, 17, 40, 100, 250)))]
            for _ in range(NUM_PROMPTS)
        ]
        self._answers: dict[int, str] = {}
        """Longest greedy answer to each prompt so far."""

    async def run(self, num_requests: int, concurrency: int, on_request: Any) -> None:
        """Keep some requests open until all were sent."""
        at_once = concurrency if self._pause else num_requests
        async with new_session() as session:

            async def work(left: Iterator[int]) -> None:
                for number in left:
                    if not self.is_over:
                        await self._ask(session)
                        on_request(number)

            for first in range(0, num_requests, at_once):
                if self.is_over:
                    return
                left = iter(range(first, min(first + at_once, num_requests)))
                await asyncio.gather(*(work(left) for _ in range(concurrency)))
                await asyncio.sleep(self._pause)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        client = make_client(
            self._dice, self._prompts, with_priority=self._with_priority, is_strict=self._is_strict
        )
        report = self._report
        try:
            async with asyncio.timeout(client.leaves_after or _PATIENCE_SECONDS):
                async with session.post(f"{self._url}/v1/completions", json=client.body) as reply:
                    body = await reply.read()
        except TimeoutError:
            if client.leaves_after is None:
                report.fault(f"no answer within {_PATIENCE_SECONDS:g} s: {client.body}")
            report.count("hung" if client.leaves_after is None else "left")
            return
        except aiohttp.ClientError as error:
            if self._processes.killed_own():
                report.count("broken with their front end")
                return
            report.count("broken")
            report.fault(f"{type(error).__name__}: {error}: {client.body}")
            return
        report.count(str(reply.status))
        if reply.status not in client.may_be:
            report.fault(f"status {reply.status}: {client.body}: {body[:300]!r}")
        elif reply.status == 200:
            self._check(client, body)

    def _check(self, client: Client, body: bytes) -> None:
        read = _stream if client.body["stream"] else _whole
        try:
            texts, reasons, error = read(body)
        except (ValueError, KeyError, IndexError) as fault:
            self._report.fault(f"{fault!r} in the answer to {client.body}: {body[-300:]!r}")
            return
        if error is not None:  # its time ran out after the answer had begun
            if 504 not in client.may_be:
                self._report.fault(f"{error} in the answer to {client.body}")
            return
        num_choices = client.body.get("n", 1)
        if sorted(reasons) != ["length"] * num_choices:
            self._report.fault(f"finish reasons {reasons} for {client.body}")
        if client.prompt >= 0:
            known = self._answers.get(client.prompt, "")
            shorter, longer = sorted((known, texts[0]), key=len)
            if not longer.startswith(shorter.rstrip("\ufffd")):  # it may end within a character
                self._report.fault(f"prompt {client.prompt}: {texts[0]!r} was {known!r} before")
            self._answers[client.prompt] = longer


def _whole(body: bytes) -> tuple[dict[int, str], list[str], Any]:
    answer = json.loads(body)
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    return texts, [choice["finish_reason"] for choice in answer["choices"]], None


def _stream(body: bytes) -> tuple[dict[int, str], list[str], Any]:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if events[-1] != b"[DONE]" or events.count(b"[DONE]") != 1:
        raise ValueError("no single [DONE] at the end")
    texts: dict[int, str] = {}
    reasons: list[str] = []
    for event in events[:-1]:
        chunk = json.loads(event)
        if "error" in chunk:
            return texts, reasons, chunk["error"]
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"] is not None:
                reasons.append(choice["finish_reason"])
    return texts, reasons, None


def running(processes: Processes) -> dict[str, int]:
    """Return the ids of the server's processes."""
    server = processes.server
    if processes.places("front-end"):  # its keeper may have died just now
        return processes.named()
    return {"server": server.process.pid, "engine": server.engine_pid}


def memory(processes: Processes) -> dict[str, float]:
    """Return the resident megabytes of each process that has not just died."""
    page, found = os.sysconf("SC_PAGE_SIZE") / 1e6, {}
    for name, pid in running(processes).items():
        with suppress(OSError):
            found[f"{name} {pid}"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
    return found


def handles(processes: Processes) -> dict[str, int]:
    """Return how many files and threads each process has."""
    return {
        f"{name} {what}": len(os.listdir(f"/proc/{pid}/{what}"))
        for name, pid in running(processes).items()
        for what in ("fd", "task")
    }


async def soak(
    report: Report, model: str, args: argparse.Namespace, num_requests: int, save: Callable[[], object]
) -> bool:
    """Run one configuration until it has so many requests; return whether it was ended before.

    Parameters
    ----------
    save : is called from time to time.
    """
    name, started, seconds = report.name, time.monotonic(), report.seconds
    every = max(1, min(num_requests // 200, 1000))
    computed = () if name == FRONT_ENDS else COMPUTED
    with deployed(model, *SMALL, *computed, *CONFIGURATIONS[name], num_engines=2) as processes:
        server = processes.server
        server.wait_until_ready()

        def on_request(_number: int) -> None:
            report.num_done += 1
            if report.num_done % every == 0:
                report.samples.append((report.num_done, memory(processes)))
                report.seconds = round(seconds + time.monotonic() - started, 1)
                save()

        load = Soak(
            processes,
            report,
            args,
            with_priority="priority" in name,
            is_strict="reject" in CONFIGURATIONS[name],
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, setattr, load, "is_over", True)  # noqa: FBT003
        await load.run(200, args.concurrency, lambda _number: None)
        await _settle(processes, report)
        before = handles(processes)
        async with disturbed(processes, report, args.fault_every, args.seed):
            await load.run(num_requests - report.num_done, args.concurrency, on_request)
        await _settle(processes, report)
        found = await asyncio.to_thread(server.metrics)
        report.preempted += found.get("onbeat_preemptions_total", 0.0)
        report.hits += found.get("onbeat_prefix_cache_hits_total", 0.0)
        for what, count in handles(processes).items():
            if count > before[what] + 3:  # threads that an engine starts with its first copies of KV
                report.fault(f"{what}: {before[what]} before, {count} after")
        server.process.terminate()
        if code := server.exit_code(timeout=60):
            report.fault(f"exit code {code}: {server.lines[-10:]}")
        if any("Traceback" in line for line in server.lines):
            report.fault(f"a traceback in the log: {server.lines[-20:]}")
    report.memory, old = _slopes(report.samples), report.memory
    for process, slope in report.memory.items():
        if slope > MOST_SLOPE and process not in old:
            report.fault(f"resident memory of the {process} grows by {slope:.2f} MB for 100,000 requests")
    report.seconds = round(seconds + time.monotonic() - started, 1)
    return load.is_over


async def _settle(processes: Processes, report: Report) -> None:
    """Wait until nothing runs, waits or holds a block."""
    names = ("onbeat_requests_running", "onbeat_requests_waiting", "onbeat_kv_blocks_used")
    deadline = time.monotonic() + 30
    left: dict[str, float] = {}
    while time.monotonic() < deadline:
        found = await asyncio.to_thread(processes.server.metrics)
        left = {name: found[name] for name in names if found[name]}
        if not left:
            return
        await asyncio.sleep(0.05)
    report.fault(f"left over when all is done: {left}")


def _slopes(samples: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the megabytes for each 100,000 requests of the processes that have lived long enough."""
    lives: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for count, found in samples:
        for process, megabytes in found.items():
            lives[process].append((count, megabytes))
    slopes = {}
    for process, life in lives.items():
        (first, _), (last, _) = life[0], life[-1]
        late = [each for each in life if each[0] > first + WARM_SHARE * (last - first)]
        if last - first >= MANY and len(late) > 2:
            counts, megabytes = np.array(late).T
            slopes[process] = round(float(np.polyfit(counts / 1e5, megabytes, 1)[0]), 3)
    return slopes


def _shares(names: Sequence[str], num_requests: int) -> dict[str, int]:
    """Return how many requests each configuration gets."""
    if len(names) < 3 or LONGEST not in names:
        return dict.fromkeys(names, num_requests // len(names))
    each = num_requests // 2 // (len(names) - 1)
    return dict.fromkeys(names, each) | {LONGEST: num_requests - each * (len(names) - 1)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all configurations and say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="of all configurations together")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help="names of configurations, with commas"
    )
    parser.add_argument("--fault-every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each --concurrency requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    names = [name for name in CONFIGURATIONS if not args.only or name in args.only]
    numbers, reports = _shares(names, args.requests), {name: Report(name) for name in names}
    if args.json and args.json.exists():
        reports |= {each["name"]: Report(**each) for each in json.loads(args.json.read_text())}

    def save() -> None:
        if args.json:
            new = args.json.with_suffix(".new")
            new.write_text(json.dumps([asdict(report) for report in reports.values()]))
            new.replace(args.json)

    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            report, model = reports[name], MODEL
            if name != FRONT_ENDS:
                changes = MODELS.get(name, {"num_hidden_layers": 1})
                model = str(write_tiny_directory(Path(folder) / name, **changes))
            is_over = report.num_done < numbers[name] and asyncio.run(
                soak(report, model, args, numbers[name], save)
            )
            save()
            print(json.dumps({**asdict(report), "samples": len(report.samples)}, indent=1))
            if is_over:
                break
    done = [reports[name] for name in names]
    num_faults = sum(len(report.faults) for report in done)
    print(f"{sum(report.num_done for report in done)} requests, {num_faults} faults")
    sys.exit(1 if num_faults else 0)


if __name__ == "__main__":
    main()
