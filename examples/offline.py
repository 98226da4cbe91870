"""Generate in this process, without a server: python examples/offline.py [MODEL]."""

from __future__ import annotations

import sys

from onbeat import LLM, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None  # None is the embedded model
    greedy = SamplingParams(temperature=0, max_tokens=24)
    with LLM(model, max_model_len=2048) as llm:
        prompts = ["The capital of France is", "Two plus two is", "Water boils at"]
        for prompt, generation in zip(prompts, llm.generate(prompts, greedy), strict=True):
            print(f"{prompt!r} -> {generation.text!r} ({generation.finish_reason})")

        # Four samples of one prompt: prompt i uses seed + i, so a second run prints the same.
        sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=24, seed=7)
        for generation in llm.generate(["Once upon a time"] * 4, sampling, stop=["."]):
            print(f"  {generation.text!r}")

        answer = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], greedy)
        print(answer.text)


if __name__ == "__main__":
    main()
