"""Make the editing tasks of speculation_live.py: those of all candidates that the model does as it is told.

    python benchmarks/speculation_prompts.py

The embedded model is small, and of many tasks it makes something else than was asked. What is studied is
answers that repeat their prompt, so it is asked every candidate once (greedy), and those are kept whose
answer is of the wanted length, comes from the prompt and does not go round in circles. A larger model would
do nearly all of them.
Writes `benchmarks/data/speculation_editing.jsonl`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from speculation_live.tasks import DATA, TASK_SETS, copied_share
from speculation_live.templates import Candidate, candidates

from onbeat import LLM, SamplingParams
from onbeat.engine.llm import Generation
from onbeat.text.chat_template import load_chat_template

MAX_TOKENS = 160
PROMPT_TOKENS, OUTPUT_TOKENS = range(120, 501), range(60, MAX_TOKENS + 1)
LEAST_COPIED = 0.7
LEAST_DIFFERENT = 0.9
"""Of the runs of four tokens in an answer: an answer that goes round in circles has few different ones."""
MOST_OF_A_KIND = 20
BATCH = 32


def main() -> None:
    args = parse_args()
    kept: list[Candidate] = []
    counts: Counter[str] = Counter()
    found = list(candidates())
    with LLM(max_model_len=2048, max_num_seqs=BATCH) as llm:
        for start in range(0, len(found), BATCH):
            group = found[start : start + BATCH]
            for candidate, generation in zip(group, ask(llm, group), strict=True):
                kind = candidate.kind.partition(":")[0]
                if is_wanted(generation) and counts[kind] < args.most_of_a_kind:
                    counts[kind] += 1
                    kept.append(candidate)
            print(f"{min(start + BATCH, len(found))} of {len(found)} asked, {len(kept)} kept", flush=True)
    write(kept, args.output)
    print(dict(counts))


def ask(llm: LLM, group: Sequence[Candidate]) -> list[Generation]:
    """Return the model's answers to chats of one message."""
    template = load_chat_template(llm.tokenizer, None)
    assert template is not None
    prompts = [
        llm.tokenizer.encode(
            template.render([{"role": "user", "content": candidate.prompt}]), add_special_tokens=False
        )
        for candidate in group
    ]
    return llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))


def is_wanted(generation: Generation) -> bool:
    """Return whether an answer repeats its prompt, once."""
    prompt, answer = generation.prompt_token_ids, generation.token_ids
    return (
        len(prompt) in PROMPT_TOKENS
        and len(answer) in OUTPUT_TOKENS
        and copied_share(prompt, answer) >= LEAST_COPIED
        and different_share(answer) >= LEAST_DIFFERENT
    )


def different_share(answer: Sequence[int], size: int = 4) -> float:
    """Return how many different runs of `size` tokens an answer has, of all its runs."""
    runs = [tuple(answer[start : start + size]) for start in range(len(answer) - size + 1)]
    return len(set(runs)) / len(runs)


def write(kept: Sequence[Candidate], path: Path) -> None:
    lines = [
        json.dumps(
            {
                "prompt": candidate.prompt,
                "output_tokens": MAX_TOKENS,
                "kind": candidate.kind,
                "source": candidate.source,
            },
            ensure_ascii=False,
        )
        for candidate in kept
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {len(kept)} tasks to {path.name}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--most-of-a-kind", type=int, default=MOST_OF_A_KIND, help="tasks of one template")
    parser.add_argument("--output", type=Path, default=DATA / TASK_SETS["editing"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
