"""Whether all servers give the same tokens: greedy and sampled, one server after another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from peers.client import Target
from peers.stage import Stage

from .tasks import Task

CONCURRENCY = 4
TIMEOUT = aiohttp.ClientTimeout(total=600)
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with log-probabilities": {"temperature": 0.0, "logprobs": True},
    "temperature 0.8, top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1, "logprobs": True},
}
"""Log-probabilities name each token; without them the texts are compared, and how many tokens they have."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    text: str
    tokens: tuple[str, ...]
    """Empty where no log-probabilities were asked for."""
    num_tokens: int
    finish_reason: str


def check_equal(stage: Stage, names: Sequence[str], tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Compare the answers of all servers with those of the first.

    Returns
    -------
    For each sampling and server: tokens compared, and the tasks whose answers differ.
    """
    rows = []
    reference: dict[str, list[Answer]] = {}
    for name in names:
        with stage.turn(name) as turn:
            found = {
                sampling: asyncio.run(_answers(turn.target, tasks, fields))
                for sampling, fields in SAMPLINGS.items()
            }
        reference = reference or found
        rows += [
            _compare(name, sampling, answers, reference[sampling]) for sampling, answers in found.items()
        ]
    return sorted(rows, key=lambda row: list(SAMPLINGS).index(row["sampling"]))


def _compare(
    name: str, sampling: str, answers: Sequence[Answer], reference: Sequence[Answer]
) -> dict[str, Any]:
    pairs = enumerate(zip(answers, reference, strict=True))
    different = [index for index, (own, its) in pairs if own != its]
    num_tokens = sum(answer.num_tokens for answer in answers)
    verdict = "equal" if not different else f"DIFFERENT in tasks {different}"
    print(f"  {name}, {sampling}: {len(answers)} answers, {num_tokens} tokens, {verdict}", flush=True)
    return {"sampling": sampling, "server": name, "num_tokens": num_tokens, "different": different}


async def _answers(target: Target, tasks: Sequence[Task], fields: Mapping[str, Any]) -> list[Answer]:
    slots = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession(timeout=TIMEOUT, raise_for_status=True) as session:

        async def ask(task: Task) -> Answer:
            messages = [{"role": "user", "content": task.prompt}]
            body = {"messages": messages, "max_tokens": task.max_tokens, **fields}
            async with slots, session.post(f"{target.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            (choice,) = answer["choices"]
            logprobs = choice["logprobs"] or {"content": []}
            return Answer(
                text=choice["message"]["content"],
                tokens=tuple(token["token"] for token in logprobs["content"]),
                num_tokens=answer["usage"]["completion_tokens"],
                finish_reason=choice["finish_reason"],
            )

        return await asyncio.gather(*map(ask, tasks))
