"""Whether all servers give the same tokens: greedy and sampled, one server after another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from peers.client import Target
from peers.stage import Stage

from .tasks import Task

CONCURRENCY = 4
TIMEOUT = aiohttp.ClientTimeout(total=600)
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
}
Answer = list[str]
"""The tokens, as the log-probabilities name them, and the finish reason."""


def check_equal(stage: Stage, names: Sequence[str], tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Compare the answers of all servers with those of the first.

    Returns
    -------
    For each sampling and server: tokens compared, and the tasks whose answers differ.
    """
    rows = []
    for sampling, fields in SAMPLINGS.items():
        reference: list[Answer] = []
        for name in names:
            with stage.turn(name) as turn:
                answers = asyncio.run(_answers(turn.target, tasks, fields))
            reference = reference or answers
            different = [
                index for index, (own, its) in enumerate(zip(answers, reference, strict=True)) if own != its
            ]
            num_tokens = sum(len(answer) - 1 for answer in answers)
            rows.append(
                {"sampling": sampling, "server": name, "num_tokens": num_tokens, "different": different}
            )
            verdict = "equal" if not different else f"DIFFERENT in tasks {different}"
            print(f"  {sampling}, {name}: {len(answers)} answers, {num_tokens} tokens, {verdict}", flush=True)
    return rows


async def _answers(target: Target, tasks: Sequence[Task], fields: Mapping[str, Any]) -> list[Answer]:
    slots = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession(timeout=TIMEOUT, raise_for_status=True) as session:

        async def ask(task: Task) -> Answer:
            body = {
                "messages": [{"role": "user", "content": task.prompt}],
                "max_tokens": task.max_tokens,
                "logprobs": True,
                **fields,
            }
            async with slots, session.post(f"{target.url}/v1/chat/completions", json=body) as response:
                (choice,) = (await response.json())["choices"]
            return [*(token["token"] for token in choice["logprobs"]["content"]), choice["finish_reason"]]

        return await asyncio.gather(*map(ask, tasks))
