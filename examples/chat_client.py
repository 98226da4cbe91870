"""Chat with a running server through the official client: python examples/chat_client.py [QUESTION].

Needs `pip install openai`. OPENAI_BASE_URL and OPENAI_API_KEY choose another server and its key.
"""

from __future__ import annotations

import os
import sys
import time

from openai import OpenAI


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
    )
    model = client.models.list().data[0].id
    start = time.perf_counter()
    ttft = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:  # the last chunk: usage, no choices
            print(f"\n[{chunk.usage.completion_tokens} tokens, first after {ttft or 0:.3f} s]")
        elif text := chunk.choices[0].delta.content:
            ttft = ttft or time.perf_counter() - start
            print(text, end="", flush=True)


if __name__ == "__main__":
    main()
