"""Tables of measured steps."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.perfmodel.device_spec import find_device
from onbeat.perfmodel.model_spec import find_model_spec
from onbeat.perfmodel.roofline import RooflineParameters
from onbeat.perfmodel.step_log import LoggedStep, read_step_table
from tests.pure.perfmodel.shapes import batch, decodes
from tests.pure.perfmodel.targets import make_roofline

MODEL = find_model_spec("Llama-3.1-8B")
DEVICE = find_device("h100-sxm")
HEADER = "batch,new_tokens,context,seconds\n"
MIXED_HEADER = "batch,new_tokens,context,decodes,decode_context,seconds\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def engine(shape: BatchShape) -> float:
    """An engine slower than the defaults, in host time above all."""
    parameters = RooflineParameters(gemm_efficiency=0.5, weight_bandwidth_efficiency=0.6, step_seconds=5e-3)
    return make_roofline(MODEL, DEVICE, parameters=parameters)(shape)


def write_measured(path: Path) -> Path:
    """Write steps of that engine: decodes alone, chunks alone, and both."""
    rows = [(size, 1, 100 * size, 0, 0) for size in (1, 4, 16, 64, 128)]
    rows += [(1, tokens, cached, 0, 0) for tokens in (64, 256, 1024, 4096) for cached in (0, 2048)]
    rows += [(2, 512, 256, num, 900) for num in (8, 32, 100)]
    lines = []
    for size, tokens, context, num, beside in rows:
        shape = batch([(context, tokens)] * size + [(beside, 1)] * num)
        lines.append(f"{size},{tokens},{context},{num},{beside},{engine(shape)}\n")
    return write(path, MIXED_HEADER + "".join(lines))


def test_a_row_is_a_step(tmp_path: Path) -> None:
    table = read_step_table(
        write(tmp_path / "t.csv", MIXED_HEADER + "4,1,99,0,0,0.01\n2,256,128,0,0,0.05\n1,64,0,3,50,0.02\n")
    )
    assert [step.shape for step in table.steps] == [
        decodes(4, 100),
        batch([(128, 256), (128, 256)]),
        batch([(0, 64), (50, 1), (50, 1), (50, 1)]),
    ]
    assert table.steps[1].shape.query_key_pairs == 2 * (256 * 128 + 256 * 257 // 2)
    assert [step.wall for step in table.steps] == [0.01, 0.05, 0.02]


def test_order_spaces_further_columns_and_gzip_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"seconds, context ,gpu,batch,new_tokens\n0.01,99,A100,4.0,1\n"))
    table = read_step_table(path)
    assert table.steps == [LoggedStep(decodes(4, 100), 0.01)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the column batch, new_tokens, context, seconds; it has no header"),
        (
            "batch,new_tokens,seconds\n1,1,0.1\n",
            "lacks the column context; it has batch, new_tokens, seconds",
        ),
        ("batch,new_tokens,context,decodes,seconds\n1,1,1,1,0.1\n", "column decode_context"),
        (HEADER, "has a header but no steps"),
        (HEADER + "1,1,100\n", r"line 2: .* 4"),
        (HEADER + "1,1,100,-0.5\n", r"line 2: .* '-0.5';"),
        (HEADER + "1,1,100,nan\n", r"line 2: .* 'nan';"),
        (HEADER + "1,1,100,inf\n", r"line 2: .* 'inf'"),
        (HEADER + "1,1,100,12 ms\n", "line 2: seconds is '12 ms'"),
        (
            HEADER + "1,1,100,0.1\n1,1,-5,0.1\n",
            r"line 3: .* '-5';",
        ),
        (HEADER + "1,1,nan,0.1\n", "context is 'nan'"),
        (HEADER + "1,1.5,10,0.1\n", "new_tokens is '1.5'"),
        (HEADER + "1,0,10,0.1\n", "new_tokens is '0';"),
        (HEADER + "0,0,10,0.1\n", "the step has no rows: batch is 0"),
        (HEADER + "1000000000000,1,10,0.1\n", "'1000000000000'; .* at most 65536"),
        (HEADER + "1,1,1e308,0.1\n", "'1e308'; .* at most 16777216"),
    ],
)
def test_bad_tables_are_refused_by_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_step_table(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.csv: No such"):
        read_step_table(tmp_path / "no.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.csv: .*UTF-8"):
        read_step_table(tmp_path / "binary.csv")
