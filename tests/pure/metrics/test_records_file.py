from __future__ import annotations

import gzip
from pathlib import Path

import orjson
import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO, Fate
from onbeat.metrics.record import RequestRecord, write_records


def make_record(**fields) -> RequestRecord:
    values = {"request_id": "r", "arrival": 1.0, "num_prompt_tokens": 10, "end": 2.0}
    return RequestRecord(**{**values, **fields})


@pytest.mark.parametrize("name", ["records.jsonl", "deep/records.jsonl.gz"])
def test_a_line_says_what_was_promised_predicted_and_decided(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    relegated = make_record(slo=SLO(ttft=0.5), predicted_ttft=0.75, fate=Fate.RELEGATED, tenant="a")
    refused = make_record(
        predicted_ttft=9.0, predicted_wait=9.0, fate=Fate.REJECTED, finish_reason="rejected"
    )
    write_records(path, [relegated, refused])
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    first, second = map(orjson.loads, lines)
    assert first["slo"] == {"ttft": 0.5, "tbt": None, "e2e": None}
    assert (first["tenant"], second["tenant"]) == ("a", None)
    assert (first["predicted_ttft"], first["relegated"], first["predicted_wait"]) == (0.75, True, None)
    assert (second["predicted_wait"], second["rejected"], second["relegated"]) == (9.0, True, False)
    assert second["finish_reason"] == "rejected"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_records(tmp_path, [])
