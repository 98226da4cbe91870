"""From the rows of operator profiles to functions of the sizes that operators depend on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onbeat.core.errors import ConfigError
from onbeat.perfmodel.model_sizes import ModelSpec
from onbeat.perfmodel.published.interpolate import PiecewiseLinear, Surface
from onbeat.perfmodel.published.operator_csv import Row, read_rows, select, time_column

EMBEDDING = "emb"
UP_PROJECTION = "mlp_up_proj"
LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    UP_PROJECTION,
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)
"""Once for each layer; the residual is added twice."""

_OPTIONAL_OPERATOR = "post_attention_layernorm"  # a model with attention and MLP side by side has none
_MLP_SIZES = ("n_head", "n_embd", "n_expanded_embd")
_ATTENTION_SIZES = ("n_q_head", "n_kv_head", "n_embd")
_TP = "num_tensor_parallel_workers"
_BYTES_PER_NUMBER = 2


def read_token_curves(path: Path, model: ModelSpec, tensor: int) -> dict[str, PiecewiseLinear]:
    """Return seconds by number of tokens of each operator that sees nothing else.

    Raises
    ------
    ConfigError : the file cannot be read, or was measured for another model or tensor-parallel degree.
    """
    names = dict.fromkeys((EMBEDDING, *LAYER_OPERATORS))
    needed = [time_column(name) for name in names if name != _OPTIONAL_OPERATOR]
    rows = read_rows(path, ["num_tokens", *needed, _TP, *_MLP_SIZES])
    sizes = (model.num_heads, model.hidden_size, model.intermediate_size)
    rows = select(rows, **{_TP: tensor}, **dict(zip(_MLP_SIZES, sizes, strict=True)))
    tokens = [row.number("num_tokens") for row in rows]
    return {
        name: PiecewiseLinear(tokens, [row.seconds(name) for row in rows])
        for name in names
        if time_column(name) in rows[0].cells
    }


def read_network_curve(path: Path | None, operator: str, workers: int, hidden_size: int) -> PiecewiseLinear:
    """Return seconds by number of tokens of one transfer of their hidden states.

    Parameters
    ----------
    path : None where the profile has none, which is an error here.
    operator : `all_reduce` or `send_recv`.
    workers : devices that take part.

    Raises
    ------
    ConfigError : there is no file, it cannot be read, or knows no such number of devices.
    """
    if path is None:
        raise ConfigError(
            f"this parallelism needs a profile of {operator} with {workers} devices, but there is none; "
            "add its CSV file"
        )
    rows = read_rows(path, [time_column(operator), "num_workers", "size", "devices_per_node"])
    rows = select(rows, num_workers=workers)
    # Of several layouts the one with most devices in a node: a replica is not spread without need.
    rows = select(rows, devices_per_node=int(max(row.number("devices_per_node") for row in rows)))
    bytes_per_token = _BYTES_PER_NUMBER * hidden_size
    return PiecewiseLinear(
        [row.number("size") / bytes_per_token for row in rows], [row.seconds(operator) for row in rows]
    )


def read_attention(path: Path, model: ModelSpec, tensor: int) -> tuple[Surface, Surface]:
    """Return one layer's attention of decodes and of a chunk. See `decode_surface` and `chunk_surface`.

    Raises
    ------
    ConfigError : the file cannot be read, or was measured for another model or tensor-parallel degree.
    """
    times = [time_column("attn_decode"), time_column("attn_prefill")]
    columns = ["batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", _TP, *_ATTENTION_SIZES]
    sizes = (model.num_heads, model.num_kv_heads, model.hidden_size)
    rows = read_rows(path, [*times, *columns])
    rows = select(rows, **{_TP: tensor}, **dict(zip(_ATTENTION_SIZES, sizes, strict=True)))
    is_chunk = [row.is_true("is_prefill") for row in rows]
    return (
        decode_surface([row for row, chunk in zip(rows, is_chunk, strict=True) if not chunk]),
        chunk_surface([row for row, chunk in zip(rows, is_chunk, strict=True) if chunk]),
    )


def decode_surface(rows: Sequence[Row]) -> Surface:
    """Return seconds of one layer's decode attention by (sequences, cached tokens of each).

    Raises
    ------
    ConfigError : no rows, or a time that is not positive.
    """
    return _surface(rows, "batch_size", "attn_decode", share=0.0)


def chunk_surface(rows: Sequence[Row]) -> Surface:
    """Return seconds of one layer's attention by (length of a chunk, cached tokens before it).

    Raises
    ------
    ConfigError : no rows, or a time that is not positive.
    """
    return _surface(
        rows, "prefill_chunk_size", "attn_prefill", share=0.5
    )  # of its own keys, a token sees half


def _surface(rows: Sequence[Row], size: str, operator: str, share: float) -> Surface:
    if not rows:
        raise ConfigError(f"the attention profile has no rows of {operator}; it needs decodes and chunks")
    return Surface(
        [row.number(size) for row in rows],
        [row.number("kv_cache_size") for row in rows],
        [row.seconds(operator) for row in rows],
        share,
    )
