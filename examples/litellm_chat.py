"""Talk to a running server in turns through LiteLLM: python examples/litellm_chat.py [QUESTION ...].

Needs `pip install litellm`. OPENAI_BASE_URL and OPENAI_API_KEY choose another server and its key. Each answer
goes back as LiteLLM made it, with fields of its own; the server ignores those.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from litellm import completion

QUESTIONS = ("What is the capital of Japan?", "And of France?")


def main() -> None:
    messages: list[Any] = []
    for question in sys.argv[1:] or QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer: Any = completion(
            model="hosted_vllm/" + os.environ.get("MODEL", "smollm2-135m-instruct"),
            api_base=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
            api_key=os.environ.get("OPENAI_API_KEY", "unused"),
            messages=messages,
            max_tokens=96,
            temperature=0,
        )
        message = answer.choices[0].message
        messages.append(message)
        print(f"> {question}\n{message.content}")


if __name__ == "__main__":
    main()
