"""Predictions a second of `onbeat predict`, on one core, by the time that the process computes.

    python -m benchmarks.serve.predictions --profile profile.json

Requests go through the whole application but for the socket: decoded, checked, predicted, encoded. What other
programs do meanwhile does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from onbeat.predict.llm_d import PredictionService, create_app
from onbeat.predict.pools import PoolConfig, build_pools


def a_request(rng: random.Random) -> dict[str, Any]:
    running = rng.randrange(200)
    return {
        "kv_cache_percentage": rng.random(),
        "input_token_length": rng.randrange(1, 20_000),
        "num_request_waiting": rng.choice((0, 0, 5)),
        "num_request_running": running,
        "num_tokens_generated": 1,
        "prefix_cache_score": rng.random(),
        "prefill_tokens_in_flight": rng.randrange(20_000),
        "decode_tokens_in_flight": 100 * running,
    }


async def ask(app: Any, path: str, body: bytes) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200, message

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)


async def rates(app: Any, rounds: int) -> None:
    rng = random.Random(7)
    for path, size in (("/predict", 1), ("/predict/bulk", 10), ("/predict/bulk", 100)):
        requests = [a_request(rng) for _ in range(size)]
        body = json.dumps(requests[0] if path == "/predict" else {"requests": requests}).encode()
        num_asked, seen = max(2000 // size, 20), []
        for _ in range(rounds):
            start = time.process_time()
            for _ in range(num_asked):
                await ask(app, path, body)
            seen.append(num_asked * size / (time.process_time() - start))
        print(f"{path}, {size} a request: {min(seen):,.0f} to {max(seen):,.0f} predictions a second")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, required=True, help="of `onbeat profile`")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pools = build_pools([PoolConfig(profile=args.profile, num_kv_tokens=400_000)])
    asyncio.run(rates(create_app(PredictionService(pools, 0.9)), args.rounds))


if __name__ == "__main__":
    main()
