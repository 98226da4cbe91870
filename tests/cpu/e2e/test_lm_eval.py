"""The evaluation harness lm-eval scores a task over HTTP as it scores transformers' own model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cpu.e2e.program import SMALL, ServerProgram, serving
from tests.cpu.golden.test_policies_smollm2 import read_hf_model

lm_eval = pytest.importorskip("lm_eval", reason="pip install -e '.[clients]' brings lm-eval")

TASK = Path(__file__).parent / "lm_eval_task"

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def exact_server(smollm2_gguf: Path) -> Iterator[ServerProgram]:
    """The embedded model with its weights as float32, which is how transformers reads them."""
    flags = ("--dtype", "float32", "--quantization", "none", "--served-model-name", "smollm2")
    with serving(smollm2_gguf, *SMALL, *flags) as server:
        yield server


def evaluate(model: Any, data: Path) -> tuple[dict[str, Any], list[list[float]]]:
    """Return the scores of the task, and the log-probability of each choice of each question."""
    from lm_eval.tasks import TaskManager

    task: Any = {
        **yaml.safe_load((TASK / "facts.yaml").read_text()),
        "dataset_kwargs": {"data_files": {"test": str(data)}},
    }
    results = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    values = [
        [answer[0] for answer in sample["filtered_resps"]] for sample in results["samples"]["onbeat_facts"]
    ]
    scores = {name: value for name, value in results["results"]["onbeat_facts"].items() if "acc" in name}
    return scores, values


def test_local_completions_score_as_transformers(
    exact_server: ServerProgram, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from transformers import AutoTokenizer

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    ours = LocalCompletionsAPI(
        base_url=f"{exact_server.url}/v1/completions",
        model="smollm2",
        tokenizer=str(tmp_path / "tokenizer"),
        tokenizer_backend="huggingface",
        batch_size=8,
        max_length=1024,
    )
    theirs = HFLM(pretrained=read_hf_model(smollm2_gguf), tokenizer=tokenizer, device="cpu", batch_size=1)
    own_scores, own_values = evaluate(ours, TASK / "facts.jsonl")
    scores, values = evaluate(theirs, TASK / "facts.jsonl")
    assert own_scores == scores
    for own_row, row in zip(own_values, values, strict=True):
        assert own_row == pytest.approx(row, abs=1e-3)
    assert scores["acc,none"] > 0.5
