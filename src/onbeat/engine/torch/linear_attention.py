"""Linear attention on torch: a state of each request that the gated delta rule changes token by token.

Each value head has a matrix that decays, forgets what it answers to a key, and learns the key's value
(Yang et al., "Gated Delta Networks", 2024). Prompts are computed in pieces: a triangular system gives all
changes of one at once (Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024).

A draft may be rejected, so no state takes one in: drafts meet a copy, and what they put in is kept beside the
state until the next step, which knows how many were accepted, and begins with these.

Legend: T tokens of a step, E those and what was pending, C numbers of a token that pass the convolution, W
tokens that it sees, U value heads, K width of a key, V of a value, R rows that decode, P tokens of a piece, D
drafts, S slots of requests, X = C + 2 U.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from onbeat.engine.input_batch import AttentionBatch, IntArray
from onbeat.engine.model_config.architecture import LinearAttention, ModelConfig
from onbeat.engine.torch.kernels import Kernels, Norm
from onbeat.engine.torch.kv import allocate_zeroed

_PIECE = 64


class LayerState(NamedTuple):
    """What one layer keeps of each request, in float32 (float64 in a float64 model)."""

    inputs_SCW: Tensor
    """The last W - 1 inputs of the convolution."""
    memory_SUKV: Tensor
    drafts_SDX: Tensor
    """What tokens put in that the state has not taken in."""


_COPY = -1
"""Slot in which drafts meet a copy of their request's state: the last one, which no request has."""


class StateRows(NamedTuple):
    """Whose states a step goes on with; tokens are places among those of all rows, pending ones first."""

    new_S: Tensor
    """Slots of requests that begin: their states are nothing."""
    tokens_R: Tensor
    slots_R: Tensor
    """Of rows with one token."""
    chunks: list[tuple[int, int, int, int | None]]
    """Of the others, and of parts of rows behind which a state is kept: first token, end, slot, and the slot
    where it is kept."""
    order_E: Tensor
    """Of each token its place in the step's, behind which those that were pending are."""
    own_T: Tensor
    """Where the step's tokens are."""
    pending_2P: Tensor
    """Slots and places of what is pending."""
    untaken_3D: Tensor
    """Tokens that will be, and their slots and places then."""

    @classmethod
    def of(cls, batch: AttentionBatch, device: torch.device) -> StateRows:
        """Return the rows of a step."""
        slots_R, nothing_R = batch.slots_R, np.zeros_like(batch.slots_R)
        pending_R = nothing_R if batch.pending_R is None else batch.pending_R
        untaken_R = nothing_R if batch.untaken_R is None else batch.untaken_R
        lens_R = batch.query_lens_R + pending_R
        ends_R, is_one_R = np.cumsum(lens_R), (lens_R == 1) & (untaken_R == 0)
        is_one_R[[row for row, _, _ in batch.kept]] = False
        chunks = list[tuple[int, int, int, int | None]]()
        for row in np.flatnonzero(~is_one_R).tolist():
            start, end, slot = int(ends_R[row] - lens_R[row]), int(ends_R[row]), int(slots_R[row])
            first, untaken = start + int(pending_R[row]), int(untaken_R[row])
            stops = [(first + num, place) for each, num, place in sorted(batch.kept) if each == row]
            for stop, place in (*stops, (end - untaken, _COPY if untaken else None)):
                chunks.append((start, stop, slot, place))
                start = stop
            chunks.append((start, end, _COPY, None))
        is_pending_E = _places(lens_R) < np.repeat(pending_R, lens_R)
        places_D = _places(untaken_R)
        last_D = np.repeat(ends_R - untaken_R, untaken_R) + places_D
        parts = (
            slots_R[batch.context_lens_R == batch.query_lens_R],
            (ends_R - 1)[is_one_R],
            slots_R[is_one_R],
            np.argsort(np.argsort(is_pending_E, kind="stable")),
            np.flatnonzero(~is_pending_E),
            np.stack((np.repeat(slots_R, pending_R), _places(pending_R))),
            np.stack((last_D, np.repeat(slots_R, untaken_R), places_D)),
        )
        new_S, tokens_R, ones_R, *others = (torch.from_numpy(part).to(device) for part in parts)
        return cls(new_S, tokens_R, ones_R, chunks, *others)


def _places(lens_R: IntArray) -> IntArray:
    """Return the place of each token in its row."""
    return np.arange(lens_R.sum()) - np.repeat(np.cumsum(lens_R) - lens_R, lens_R)


def allocate_state(
    config: ModelConfig, num_slots: int, most_drafts: int, wide: torch.dtype, device: torch.device
) -> LayerState:
    """Return the states of one layer, and room for a copy of one."""
    linear = config.linear
    assert linear is not None, "the model has linear attention"
    inputs = linear.conv_size, linear.conv_width - 1
    memory = linear.num_value_heads, linear.key_dim, linear.value_dim
    shapes = inputs, memory, (most_drafts, linear.draft_numbers)
    return LayerState(*(allocate_zeroed((num_slots + 1, *shape), wide, device) for shape in shapes))


class _Tokens(NamedTuple):
    """What the rule reads of some tokens, tokens first, value heads second."""

    q_TUK: Tensor
    k_TUK: Tensor
    v_TUV: Tensor
    decay_TU: Tensor
    """Logarithms."""
    beta_TU: Tensor


class DeltaRule(NamedTuple):
    """What one layer has between its projections."""

    sizes: LinearAttention
    conv_CW: Tensor
    a_log_U: Tensor
    dt_bias_U: Tensor
    norm: Norm
    """Of each head that comes out."""

    def mix(self, x_TX: Tensor, rows: StateRows, state: LayerState, kernels: Kernels) -> Tensor:
        """Return what comes out of all heads of each token, [T, U V], and change the states.

        Parameters
        ----------
        x_TX : what is projected, in the order of `input_projections`.
        """
        sizes, heads = self.sizes, self.sizes.num_value_heads
        widths = sizes.conv_size, sizes.value_size, heads, heads
        input_TC, gate_TZ, b_TU, a_TU = x_TX.split(widths, dim=-1)
        for part in state[:2]:
            part.index_fill_(0, rows.new_S, 0.0)
        wide = state.memory_SUKV.dtype
        put_in_EX = torch.cat((input_TC, b_TU, a_TU), -1).to(wide)
        if rows.pending_2P.numel():
            put_in_EX = torch.cat((put_in_EX, state.drafts_SDX[tuple(rows.pending_2P)]))[rows.order_E]
        input_EC, b_EU, a_EU = put_in_EX.split((sizes.conv_size, heads, heads), dim=-1)
        conv_EC = self._convolved(input_EC, rows, state.inputs_SCW)
        decay_EU = -self.a_log_U.float().exp() * functional.softplus(a_EU.float() + self.dt_bias_U)
        tokens = self._tokens(conv_EC, decay_EU.to(wide), b_EU.to(x_TX.dtype).sigmoid().to(wide))
        mixed_EUV = torch.empty_like(tokens.v_TUV)
        if len(rows.slots_R):
            decodes = _Tokens(*(part[rows.tokens_R] for part in tokens))
            mixed_EUV[rows.tokens_R] = _decode(decodes, state.memory_SUKV, rows.slots_R)
        for first, end, slot, place in rows.chunks:
            if first < end:
                some = _Tokens(*(part[first:end] for part in tokens))
                mixed_EUV[first:end] = _prompt(some, state.memory_SUKV[slot])
            if place is not None:
                state.memory_SUKV[place] = state.memory_SUKV[slot]
        state.drafts_SDX[tuple(rows.untaken_3D[1:])] = put_in_EX[rows.untaken_3D[0]]
        mixed_TUV = mixed_EUV[rows.own_T]
        flat = mixed_TUV.to(x_TX.dtype).view(-1, sizes.value_dim)
        kernels.add_norm(None, flat, self.norm, flat)
        gates = functional.silu(gate_TZ.to(torch.float32)).view_as(mixed_TUV)
        return (flat.view_as(mixed_TUV) * gates).to(x_TX.dtype).flatten(1)

    def _convolved(self, input_TC: Tensor, rows: StateRows, inputs_SCW: Tensor) -> Tensor:
        """Return what comes out of the convolution, [T, C], and keep each row's last inputs."""
        out_TC, filter_CW = torch.empty_like(input_TC), self.conv_CW.to(input_TC.dtype)
        before = self.sizes.conv_width - 1
        if len(rows.slots_R):
            seen_RCW = torch.cat((inputs_SCW[rows.slots_R], input_TC[rows.tokens_R, :, None]), -1)
            out_TC[rows.tokens_R] = (seen_RCW * filter_CW).sum(-1)
            inputs_SCW[rows.slots_R] = seen_RCW[:, :, 1:]
        for first, end, slot, place in rows.chunks:
            if first < end:
                seen_CT = torch.cat((inputs_SCW[slot], input_TC[first:end].T), -1)
                found = functional.conv1d(seen_CT[None], filter_CW[:, None], groups=len(filter_CW))
                out_TC[first:end] = found[0].T
                inputs_SCW[slot] = seen_CT[:, seen_CT.shape[1] - before :]
            if place is not None:
                inputs_SCW[place] = inputs_SCW[slot]
        return functional.silu(out_TC)

    def _tokens(self, conv_TC: Tensor, decay_TU: Tensor, beta_TU: Tensor) -> _Tokens:
        sizes, num_tokens = self.sizes, len(conv_TC)
        turns = sizes.num_key_heads if sizes.alternates else sizes.num_value_heads
        key_heads_U = torch.arange(sizes.num_value_heads) % turns * sizes.num_key_heads // turns
        q_TC, k_TC, v_TC = conv_TC.split((sizes.key_size, sizes.key_size, sizes.value_size), -1)
        q_TUK, k_TUK = (
            _unit(part.reshape(num_tokens, sizes.num_key_heads, sizes.key_dim))[:, key_heads_U]
            for part in (q_TC, k_TC)
        )
        v_TUV = v_TC.reshape(num_tokens, sizes.num_value_heads, sizes.value_dim)
        return _Tokens(q_TUK * sizes.key_dim**-0.5, k_TUK, v_TUV, decay_TU, beta_TU)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _decode(tokens: _Tokens, memory_SUKV: Tensor, slots_R: Tensor) -> Tensor:
    """Change the memories by one token each, and return their answers to the queries, [R, U, V]."""
    memory_RUKV = memory_SUKV[slots_R] * tokens.decay_TU.exp()[:, :, None, None]
    known_RUV = torch.einsum("ruk,rukv->ruv", tokens.k_TUK, memory_RUKV)
    change_RUV = (tokens.v_TUV - known_RUV) * tokens.beta_TU[:, :, None]
    memory_RUKV += tokens.k_TUK[..., None] * change_RUV[:, :, None]
    memory_SUKV[slots_R] = memory_RUKV
    return torch.einsum("ruk,rukv->ruv", tokens.q_TUK, memory_RUKV)


def _prompt(tokens: _Tokens, memory_UKV: Tensor) -> Tensor:
    """Change one memory by tokens that follow one another; return its answers, [T, U, V]."""
    found = [
        _piece(_Tokens(*few), memory_UKV)
        for few in zip(*(part.split(_PIECE) for part in tokens), strict=True)
    ]
    return torch.cat(found)


def _piece(tokens: _Tokens, memory_UKV: Tensor) -> Tensor:
    """Change a memory by a piece: what each token changes depends on those before it in the piece."""
    q_UPK, k_UPK, v_UPV = (part.transpose(0, 1) for part in tokens[:3])
    total_UP1 = tokens.decay_TU.T.cumsum(-1)[..., None]
    decays_UPP = (
        (total_UP1 - total_UP1.transpose(1, 2))
        .masked_fill(
            torch.ones(len(tokens.v_TUV), len(tokens.v_TUV), dtype=torch.bool, device=v_UPV.device).triu(1),
            -torch.inf,
        )
        .exp()
    )
    beta_UP1 = tokens.beta_TU.T[..., None]
    system_UPP = beta_UP1 * decays_UPP * (k_UPK @ k_UPK.transpose(1, 2))  # below the diagonal, on which is 1
    wanted_UPV = beta_UP1 * (v_UPV - total_UP1.exp() * (k_UPK @ memory_UKV))
    change_UPV = torch.linalg.solve_triangular(system_UPP, wanted_UPV, upper=False, unitriangular=True)
    answers_UPV = total_UP1.exp() * (q_UPK @ memory_UKV)
    answers_UPV += (q_UPK @ k_UPK.transpose(1, 2) * decays_UPP) @ change_UPV
    last_U11 = total_UP1[:, -1:]
    memory_UKV.mul_(last_U11.exp())
    memory_UKV.add_((k_UPK * (last_U11 - total_UP1).exp()).transpose(1, 2) @ change_UPV)
    return answers_UPV.transpose(0, 1)
