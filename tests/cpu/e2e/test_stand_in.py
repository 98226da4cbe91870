"""`onbeat serve --load-format stand-in`: a device that is not here, behind the real program."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.cpu.e2e.program import environment, run_program, serving

SKY = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 40}


def test_a_chat_with_a_stand_in(smollm2_gguf: Path) -> None:
    flags = ("--load-format", "stand-in", "--device", "h100-sxm", "--max-model-len", "4096")
    with serving("Llama-3.1-8B", *flags, "--tokenizer", smollm2_gguf) as server:
        example = server.example().splitlines()
        stands_in, room, speed, ready, stop, *shown = server.lines
        assert stands_in.startswith("stand-in ")
        assert room.endswith(" 4,096")
        assert speed.startswith("speed: ")
        assert (ready[:9], stop[:6], shown) == ("ready in ", "Ctrl-C", example)
        answers = [httpx.post(f"{server.url}/v1/chat/completions", json=SKY).json() for _ in range(2)]
        (choice,) = answers[0]["choices"]
        assert choice["finish_reason"] == "length"
        assert answers[0]["usage"]["completion_tokens"] == 40
        assert answers[0]["model"] == "Llama-3.1-8B"
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json={**SKY, "stream": True}
        ) as answer:
            assert sum(line.startswith("data: {") for line in answer.iter_lines()) >= 40
        greedy = {**SKY, "temperature": 0}
        texts = [
            httpx.post(f"{server.url}/v1/chat/completions", json=greedy).json()["choices"][0]["message"]
            for _ in range(2)
        ]
        assert texts[0] == texts[1]
        metrics = server.metrics()
        assert metrics["onbeat_output_tokens_total"] == 200


def test_a_device_must_be_named() -> None:
    run = run_program("serve", "--port", "0", "Llama-3.1-8B", "--load-format", "stand-in", env=environment())
    assert run.returncode == 2
    assert "--device, " in run.stderr
