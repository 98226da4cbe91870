"""What rows want beyond a draw, on the device: edited logits, grammars, log-probabilities.

The host says which logits change and which tokens a grammar allows while the device computes the step. What
it says goes up in one copy, and what it wants to know of the tokens comes back in one.

Legend: N tokens that are sampled, V vocabulary, E edits, G rows under a grammar, W words of a mask, C rows
that want log-probabilities, L tokens that such rows name, K most likely tokens, A rows at once.
"""

# ruff: noqa: N815 -- tensor names carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onbeat.core.request import TokenLogprobs
from onbeat.engine.cuda.stream import DeviceStream
from onbeat.engine.guided_draw import GuideOutcome, allowed_masks, open_guides
from onbeat.engine.input_batch import IntArray
from onbeat.engine.logit_edits import logit_edits
from onbeat.engine.random_stream import uniform
from onbeat.engine.sampled import BestTokens
from onbeat.engine.sampling_row import SamplingRow
from onbeat.engine.torch.kernels import BestBuffers, DrawParams, GraphKernels

_ROWS_AT_ONCE = 16
"""Whose log-probabilities are computed together: a bound on the memory that this takes."""


class _Uploaded(NamedTuple):
    """What the device must know, as NumPy's arrays or as tensors; int64 unless said otherwise.

    Places of logits are places in all rows of them, one behind the other.
    """

    penalised_E: Any
    penalties_E: Any
    """float64: repetition penalty of each."""
    lowered_by_E: Any
    """float64."""
    biased_E: Any
    bias_E: Any
    """float64."""
    restricted_R: Any
    """Rows of logits of which nothing but the next is allowed."""
    allowed_E: Any
    banned_E: Any
    guided_G: Any
    """Rows of logits."""
    numbers_G: Any
    """float64: what the tokens are drawn by that replace refused ones."""
    masks_GW: Any
    """64 bits a word."""
    reported_C: Any
    """Rows of logits."""
    named_CL: Any


class Choice:
    """How the tokens of one step are chosen, where some row is not plain.

    Parameters
    ----------
    rows : that sample; what each has said so far is known where it matters (`SamplingRow.needs_output`).
    places_N : each one's row of logits.
    vocab_size : logits of a row.
    stream : gives memory that the device reads and writes.
    """

    def __init__(
        self, rows: Sequence[SamplingRow], places_N: IntArray, vocab_size: int, stream: DeviceStream
    ) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self.masks = GuideOutcome()
        guided = open_guides(rows)
        self._reported = [index for index, row in enumerate(rows) if row.asks_logprobs]
        asked = [rows[index].params for index in self._reported]
        self._num_likely = max(
            (each.num_logprobs or 0 for each in asked if not each.logprob_token_ids), default=0
        )
        self._num_likely = min(self._num_likely, vocab_size)
        named = max((len(each.logprob_token_ids) for each in asked), default=0)
        parts = [
            *_edits(rows, places_N, vocab_size),
            places_N[guided],
            np.array([uniform(rows[i].params.seed, rows[i].position, draw=1) for i in guided]),
            self._masks(guided),
            places_N[self._reported],
            np.array(
                [each.logprob_token_ids + (0,) * (named - len(each.logprob_token_ids)) for each in asked],
                np.int64,
            ).reshape(len(asked), named),
        ]
        self._shapes = [(part.shape, part.dtype == np.float64) for part in parts]
        flat = np.concatenate([part.view(np.int64).ravel() for part in parts])
        self._words = stream.pinned(2 * len(flat)).view(torch.int64)
        self._words.numpy()[:] = flat
        self._num_guided, self._width = len(guided), 2 + 2 * (self._num_likely + named)
        self._told = stream.pinned(2 * (len(guided) + len(asked) * self._width)).view(torch.float64)

    def _masks(self, guided: Sequence[int]) -> NDArray[np.int64]:
        if not guided:
            return np.zeros((0, 0), np.int64)
        masks_GW = allowed_masks(self._rows, guided, self.masks)
        return np.pad(masks_GW, ((0, 0), (0, masks_GW.shape[1] % 2))).view(np.int64)

    def queue(
        self, kernels: GraphKernels, logits_NV: Tensor, best: BestBuffers, draws: DrawParams | None
    ) -> None:
        """Queue the choice and the way back of what is told of it.

        Parameters
        ----------
        logits_NV : the model's, which stay as they are.
        best : of these; then what was chosen, and the largest of the logits that it was chosen from: -inf
            where the row's parameters leave no token.
        draws : None where no row is random.
        """
        given = self._on_device(logits_NV.device)
        edited_NV = logits_NV
        model_peaks_N = best.peaks_R.clone()
        if len(given.penalised_E) + len(given.biased_E) + len(given.restricted_R) + len(given.banned_E):
            edited_NV = logits_NV.clone()
            _edit(edited_NV, given)
            kernels.best(edited_NV, best)
        if draws is not None:
            drawn_N = torch.empty_like(best.ids_R)
            kernels.draw(edited_NV, draws, best, drawn_N)
            best.ids_R.copy_(drawn_N)
        told = [self._hold(kernels, edited_NV, best, draws, given)]
        told += [
            _reports(logits_NV, best.ids_R, places_A, named_AL, self._num_likely).view(-1)
            for places_A, named_AL in zip(
                given.reported_C.split(_ROWS_AT_ONCE), given.named_CL.split(_ROWS_AT_ONCE), strict=True
            )
        ]
        # What the model itself made of a row comes before what its parameters made of that.
        wrong_N = model_peaks_N.masked_fill(model_peaks_N == -torch.inf, torch.nan)
        best.peaks_R.copy_(torch.where(model_peaks_N.isfinite(), best.peaks_R, wrong_N))
        self._told.copy_(torch.cat(told), non_blocking=True)

    def _on_device(self, device: torch.device) -> _Uploaded:
        words = self._words.to(device, non_blocking=True)
        parts = words.split([int(np.prod(shape)) for shape, _ in self._shapes])
        return _Uploaded(
            *(
                (part.view(torch.float64) if is_float else part).view(shape)
                for part, (shape, is_float) in zip(parts, self._shapes, strict=True)
            )
        )

    def _hold(
        self,
        kernels: GraphKernels,
        logits_NV: Tensor,
        best: BestBuffers,
        draws: DrawParams | None,
        given: _Uploaded,
    ) -> Tensor:
        """Put other tokens in the place of those that grammars refuse; return which were refused, [G]."""
        rows_G: Tensor = given.guided_G
        if not len(rows_G):
            return best.peaks_R.new_empty(0, dtype=torch.float64)
        bytes_GB: Tensor = given.masks_GW.view(torch.uint8)
        shifts = torch.arange(8, dtype=torch.uint8, device=bytes_GB.device)
        bits_GV = ((bytes_GB[:, :, None] >> shifts) & 1).flatten(1)[:, : logits_NV.shape[1]].bool()
        allowed_GV = logits_NV.index_select(0, rows_G).masked_fill_(~bits_GV, -torch.inf)
        others = BestBuffers(*(part.index_select(0, rows_G) for part in best))
        kernels.best(allowed_GV, others)
        ids_G = others.ids_R
        if draws is not None:
            ids_G = torch.empty_like(ids_G)
            params = DrawParams(*(part.index_select(0, rows_G) for part in draws))
            kernels.draw(allowed_GV, params._replace(numbers_R=given.numbers_G), others, ids_G)
        first_G, peaks_G = (part.index_select(0, rows_G) for part in best)
        is_allowed_G = bits_GV.gather(1, first_G.long()[:, None])[:, 0] | ~peaks_G.isfinite()
        best.ids_R.index_copy_(0, rows_G, torch.where(is_allowed_G, first_G, ids_G))
        best.peaks_R.index_copy_(0, rows_G, torch.where(is_allowed_G, peaks_G, others.peaks_R))
        return torch.logical_not(is_allowed_G).double()

    def told(self, best: BestTokens) -> BestTokens:
        """Return a step's tokens with what came back beside them, once it is done."""
        values = self._told.numpy()
        num_refused = int(values[: self._num_guided].sum())
        masks = replace(self.masks, num_redrawn=num_refused) if self._num_guided else None
        lines = values[self._num_guided :].reshape(len(self._reported), self._width)
        logprobs: list[TokenLogprobs | None] = [None] * len(self._rows) if self._reported else []
        for index, line in zip(self._reported, lines.tolist(), strict=True):
            logprobs[index] = self._report(index, int(best.ids_R[index]), line)
        return best._replace(logprobs=logprobs, masks=masks)

    def _report(self, index: int, token_id: int, line: list[float]) -> TokenLogprobs:
        """Return what `token_logprobs` says of the same token."""
        params, (mass, own, *rest) = self._rows[index].params, line
        values, ids = rest[: len(rest) // 2], [int(each) for each in rest[len(rest) // 2 :]]
        if params.logprob_token_ids:
            start = self._num_likely
            others = zip(ids[start:], values[start:], strict=True)
            shown = {token_id: own, **dict(list(others)[: len(params.logprob_token_ids)])}
        else:
            num = min(params.num_logprobs or 0, self._num_likely)
            shown = dict(zip(ids[:num], values[:num], strict=True))
        return TokenLogprobs(
            token_id, own - mass, tuple(shown), tuple(value - mass for value in shown.values()), None
        )


def _edits(rows: Sequence[SamplingRow], places_N: IntArray, vocab_size: int) -> list[NDArray[Any]]:
    """Return `_Uploaded` up to `banned_E`."""
    ints = [np.zeros(0, np.int64)]
    penalised, biased, restricted, allowed, banned = ints[:], ints[:], ints[:], ints[:], ints[:]
    penalties, lowered, bias = ([np.zeros(0)] for _ in range(3))
    for row, place in zip(rows, places_N.tolist(), strict=True):
        if not row.edits_logits:
            continue
        edits, start = logit_edits(row, vocab_size), place * vocab_size
        penalised.append(start + edits.penalised)
        penalties.append(np.full(len(edits.penalised), row.params.repetition_penalty))
        lowered.append(edits.lowered_by)
        biased.append(start + edits.biased)
        bias.append(edits.bias)
        if edits.allowed is not None:
            restricted.append(np.array([place]))
            allowed.append(start + edits.allowed)
        banned.append(start + edits.banned)
    lists = penalised, penalties, lowered, biased, bias, restricted, allowed, banned
    return [np.concatenate(each) for each in lists]


def _edit(logits_NV: Tensor, given: _Uploaded) -> None:
    """Change logits in place, in the order of `LogitEdits`."""
    flat, dtype = logits_NV.view(-1), logits_NV.dtype
    values_E, penalties_E = flat.index_select(0, given.penalised_E), given.penalties_E.to(dtype)
    values_E = torch.where(values_E > 0, values_E / penalties_E, values_E * penalties_E)
    values_E = (values_E - given.lowered_by_E.to(dtype)).clamp(max=torch.finfo(dtype).max)
    flat.index_copy_(0, given.penalised_E, values_E)
    flat.index_add_(0, given.biased_E, given.bias_E.to(dtype))
    kept_E = flat.index_select(0, given.allowed_E)
    logits_NV.index_fill_(0, given.restricted_R, -torch.inf)
    flat.index_copy_(0, given.allowed_E, kept_E)
    flat.index_fill_(0, given.banned_E, -torch.inf)


def _reports(logits_NV: Tensor, ids_N: Tensor, places_A: Tensor, named_AL: Tensor, num_likely: int) -> Tensor:
    """Return what is told of some rows, float64.

    That is the logarithm of the mass of all tokens, then the logit of the row's token, then those of the most
    likely ones and of the named ones, then the ids of both.
    """
    logits_AV = logits_NV.index_select(0, places_A)
    own_A1 = ids_N.index_select(0, places_A).long()[:, None]
    shown_AX = torch.cat((_most_likely(logits_AV, num_likely), named_AL), dim=1)
    peaks_A1 = logits_AV.amax(1, keepdim=True)
    # In float64 the sum has the same bits in float32, however many rows there are.
    masses_A1 = (logits_AV - peaks_A1).exp_().sum(1, keepdim=True, dtype=torch.float64).log_() + peaks_A1
    values_AX = logits_AV.gather(1, torch.cat((own_A1, shown_AX), dim=1))
    return torch.cat((masses_A1, values_AX.double(), shown_AX.double()), dim=1)


def _most_likely(logits_AV: Tensor, count: int) -> Tensor:
    """Return the ids of the most likely tokens, int64 [A, K]: of equals, those of the lowest ids."""
    if not count:
        return logits_AV.new_empty(len(logits_AV), 0, dtype=torch.int64)
    bounds_A1 = logits_AV.topk(count).values[:, -1:]
    is_above_AV, is_equal_AV = logits_AV > bounds_A1, logits_AV == bounds_A1
    num_equal_A1 = count - is_above_AV.sum(1, keepdim=True)
    is_likely_AV = is_above_AV | (is_equal_AV & (is_equal_AV.cumsum(1) <= num_equal_A1))
    vocab_size = logits_AV.shape[1]
    falling_V = torch.arange(vocab_size, 0, -1, device=logits_AV.device)
    ids_AK = (vocab_size - (is_likely_AV * falling_V).topk(count).values).clamp_(max=vocab_size - 1)
    order_AK = logits_AV.gather(1, ids_AK).sort(dim=1, descending=True, stable=True).indices
    return ids_AK.gather(1, order_AK)
