"""Asks questions in both ways, and says what each cost and found: python examples/planner/run.py.

Needs `pip install openai`, and a server: `onbeat serve`. OPENAI_BASE_URL and OPENAI_API_KEY choose another
server and its key, MODEL the model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assistant import Answer, Assistant
from index import Index, read_passages
from openai import AsyncOpenAI

HERE = Path(__file__).parent


async def run(args: argparse.Namespace) -> None:
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    key, model = os.environ.get("OPENAI_API_KEY", "unused"), os.environ.get("MODEL", "smollm2-135m-instruct")
    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        index = Index(client, model, read_passages(HERE / "documents.jsonl"))
        await index.build()
        assistant = Assistant(client, model, index, args.deadline)
        lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
        questions: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for plans in (False, True):
            answers = [await assistant.ask(each["question"], plans=plans) for each in questions * args.rounds]
            report("plan" if plans else "chain", questions, answers, is_long=args.show)
        alone = [await index.search(each["question"], 4) for each in questions]
    share = statistics.mean(_share_found(each, found) for each, found in zip(questions, alone, strict=True))
    print(
        f"for comparison, the question itself as the only search, 4 passages: {share:.0%} of what is needed"
    )


def report(
    name: str, questions: Sequence[dict[str, Any]], answers: Sequence[Answer], *, is_long: bool
) -> None:
    """Print what a way to answer has cost, and how much of what is needed it has found."""
    if is_long:
        for each, answer in zip(questions, answers, strict=False):
            print(f"\n{each['question']}\n  searched: {'; '.join(answer.queries)}\n  answer: {answer.text}")
    pairs = zip(list(questions) * (len(answers) // len(questions)), answers, strict=True)
    found = statistics.mean(_share_found(each, answer.found) for each, answer in pairs)
    seconds = statistics.median(answer.seconds for answer in answers)
    print(
        f"{name}: {statistics.mean(answer.num_calls for answer in answers):.1f} calls, "
        f"median {seconds:.2f} s, {statistics.mean(answer.is_in_time for answer in answers):.0%} in time, "
        f"{found:.0%} of the passages needed were found"
    )


def _share_found(question: dict[str, Any], found: Sequence[Any]) -> float:
    names = {each.name for each in found}
    return statistics.mean(name in names for name in question["needs"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all questions are asked")
    parser.add_argument("--deadline", type=float, default=2.0, help="of a whole answer, seconds")
    parser.add_argument("--show", action="store_true", help="print searches and answers")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
