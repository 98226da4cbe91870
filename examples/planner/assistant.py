"""Two ways to answer from an index: a chain of calls, or one call that plans all searches.

The second is that of REAPER (arXiv 2407.18553). All calls of an answer are one job with one deadline,
which the server divides among them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from index import Index, Passage
from openai import APIStatusError, AsyncOpenAI

NUM_SEARCHES = 3
"""Of a chain, and the most of a plan."""
PASSAGES_A_SEARCH = 2
QUERY = {"type": "string", "minLength": 3, "maxLength": 60}
THOUGHT = {"type": "string", "minLength": 3, "maxLength": 80}
STEP_SCHEMA = {
    "type": "object",
    "properties": {"thought": THOUGHT, "query": QUERY},
    "required": ["thought", "query"],
    "additionalProperties": False,
}
PLAN_SCHEMA = {
    "type": "object",
    "properties": {"queries": {"type": "array", "items": QUERY, "minItems": 1, "maxItems": NUM_SEARCHES}},
    "required": ["queries"],
    "additionalProperties": False,
}
SYSTEM = "You help the customers of a bicycle station. Passages of its handbook are found by a search."
PLAN = "Name the searches that find what is needed to answer."
NEXT = "What should be searched next?"
ANSWER = "Answer the question in one or two sentences, from these passages alone:\n"


@dataclass
class Answer:
    """What came of a question."""

    text: str = ""
    queries: list[str] = field(default_factory=list)
    found: list[Passage] = field(default_factory=list)
    num_calls: int = 0
    seconds: float = 0.0
    is_in_time: bool = False
    """As the server says of the job."""


class Assistant:
    """Answers questions within a deadline."""

    def __init__(self, client: AsyncOpenAI, model: str, index: Index, deadline: float) -> None:
        self._client = client
        self._model = model
        self._index = index
        self._deadline = deadline
        self._numbers = itertools.count()
        self._name = uuid.uuid4().hex[:8]

    async def ask(self, question: str, *, plans: bool) -> Answer:
        """Return the answer to a question; without one if the server refused a call."""
        answer, began = Answer(), time.perf_counter()
        job = {"id": f"{self._name}-{next(self._numbers)}", "e2e_ms": self._deadline * 1e3}
        job["class"] = "plan" if plans else "chain"
        try:
            await (self._plan if plans else self._chain)(question, answer, job)
        except APIStatusError as error:
            answer.text = f"no answer: {error.message}"
        answer.seconds = time.perf_counter() - began
        return answer

    async def _chain(self, question: str, answer: Answer, job: dict[str, Any]) -> None:
        """Choose a search, read what it found, choose the next one."""
        messages = [_message("system", SYSTEM), _message("user", f"{question}\n{NEXT}")]
        for left in range(NUM_SEARCHES, 0, -1):
            step = await self._call(answer, messages, job | {"calls_left": left}, STEP_SCHEMA)
            query = json.loads(step)["query"]
            answer.queries.append(query)
            found = await self._index.search(query, PASSAGES_A_SEARCH)
            answer.found += [each for each in found if each not in answer.found]
            messages += [_message("assistant", step), _message("user", f"{_lines(found)}\n{NEXT}")]
        messages[-1] = _message("user", f"{ANSWER}{_lines(answer.found)}\nQuestion: {question}")
        answer.text = await self._call(answer, messages, job | {"calls_left": 0})

    async def _plan(self, question: str, answer: Answer, job: dict[str, Any]) -> None:
        """Name all searches in one call, and run them at once."""
        messages = [_message("system", SYSTEM), _message("user", f"{question}\n{PLAN}")]
        plan = await self._call(answer, messages, job | {"calls_left": 1}, PLAN_SCHEMA)
        answer.queries = json.loads(plan)["queries"]
        found = await asyncio.gather(
            *(self._index.search(query, PASSAGES_A_SEARCH) for query in answer.queries)
        )
        answer.found = list(dict.fromkeys(itertools.chain.from_iterable(found)))
        text = f"{ANSWER}{_lines(answer.found)}\nQuestion: {question}"
        messages += [_message("assistant", plan), _message("user", text)]
        answer.text = await self._call(answer, messages, job | {"calls_left": 0})

    async def _call(
        self, answer: Answer, messages: list[Any], job: dict[str, Any], schema: dict[str, Any] | None = None
    ) -> str:
        """Return what the model says; with a schema it is JSON that matches."""
        fields: dict[str, Any] = {"slo": {"job": job}}
        if schema is not None:
            fields["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
        reply = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=160 if schema is not None else 48,
            temperature=0,
            extra_body=fields,
        )
        answer.num_calls += 1
        told = (reply.model_extra or {}).get("slo") or {}
        answer.is_in_time = bool((told.get("job") or {}).get("met"))
        return reply.choices[0].message.content or ""


def _message(role: str, content: str) -> Any:
    return {"role": role, "content": content}


def _lines(passages: list[Passage]) -> str:
    return "\n".join(f"- {each.text}" for each in passages)
