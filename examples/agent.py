"""An agent: a running server's model calls functions until it answers: python examples/agent.py [QUESTION].

Needs `pip install openai`. OPENAI_BASE_URL and OPENAI_API_KEY choose another server and its key, MODEL the
model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

QUESTION = "Order the cheapest lamp that we have in stock, and tell me the number of the order."
MAX_CALLS = 5
"""The model gets no more tools after this many."""

STOCK = {"lamp-1": 40, "lamp-2": 25, "desk-1": 120}


def find(word: str) -> list[str]:
    return [item for item in STOCK if word in item]


def price(item: str) -> int:
    return STOCK[item]


def order(item: str) -> str:
    return f"order 7781 of {item}"


FUNCTIONS: dict[str, tuple[Callable[..., object], str, str]] = {
    "find": (find, "word", "Names of items"),
    "price": (price, "item", "What an item costs"),
    "order": (order, "item", "Order an item"),
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, (_, key, text) in FUNCTIONS.items()
]


def run(name: str, arguments: str) -> str:
    """Return the result of a call as JSON. A model may call wrongly: it is told so, and may call again."""
    try:
        return json.dumps(FUNCTIONS[name][0](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    messages: list[Any] = [{"role": "user", "content": " ".join(sys.argv[1:]) or QUESTION}]
    num_calls = 0
    while True:
        answer = client.chat.completions.create(
            model=os.environ.get("MODEL", "smollm2-135m-instruct"),
            messages=messages,
            tools=TOOLS,
            tool_choice="auto" if num_calls < MAX_CALLS else "none",
            max_tokens=256,
            temperature=0,
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            num_calls += 1
            assert call.type == "function"
            result = run(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)


if __name__ == "__main__":
    main()
