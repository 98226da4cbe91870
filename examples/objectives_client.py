"""Ask a server to keep objectives, and hear how it did: python examples/objectives_client.py [QUESTION].

Needs `pip install openai`. OPENAI_BASE_URL and OPENAI_API_KEY choose another server and its key; TTFT_MS and
TBT_MS the objectives.
"""

from __future__ import annotations

import os
import sys
import time

from openai import APIStatusError, OpenAI

ATTEMPTS = 3


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Why is the sky blue?"
    client = OpenAI(
        base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "unused"),
        max_retries=0,  # by default it would try again by itself, and not tell
    )
    slo = {
        "ttft_ms": float(os.environ.get("TTFT_MS", "1000")),
        "tbt_ms": float(os.environ.get("TBT_MS", "100")),
        "shed": True,  # rather refused at once than answered late
    }
    for _ in range(ATTEMPTS):
        try:
            ask(client, question, slo)
        except APIStatusError as refusal:
            if refusal.status_code not in (429, 503, 504):
                raise
            wait = float(refusal.response.headers.get("retry-after-ms", 1000)) / 1e3
            print(f"refused ({refusal.code}): {refusal.message}; again in {wait:.2f} s", file=sys.stderr)
            time.sleep(wait)
        else:
            return
    raise SystemExit(f"refused {ATTEMPTS} times: ask for less, or go elsewhere")


def ask(client: OpenAI, question: str, slo: dict[str, float]) -> None:
    """Stream an answer, then print how its objectives were kept."""
    promise = None
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_completion_tokens=96,
        stream=True,
        extra_body={"slo": slo},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        promise = getattr(chunk, "slo", promise)  # on the last chunk: a field that OpenAI's API lacks
    print()
    if promise is not None:
        kept = "kept" if promise["met"] else "missed"
        predicted = promise["predicted_ttft_ms"]
        expected = "not predicted" if predicted is None else f"predicted {predicted:.0f} ms"
        print(f"[{kept}: first after {promise['ttft_ms']:.0f} ms, {expected}]")


if __name__ == "__main__":
    main()
