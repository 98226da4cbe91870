"""FlashInfer's functions and classes as far as they are used: they remember calls, and attend to nothing.

Parameters and defaults are those of 0.6.14; a test compares them where the library is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onbeat.engine.cuda.flashinfer_attention import FlashInfer


class Recorder:
    """The calls, by name: arguments by the names of their parameters, `self` left out."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def note(self, name: str, arguments: dict[str, Any]) -> None:
        self.calls.append((name, {key: value for key, value in arguments.items() if key != "self"}))

    def last(self, name: str) -> dict[str, Any]:
        """Return the arguments of the last call."""
        return next(arguments for called, arguments in reversed(self.calls) if called == name)

    def library(self) -> FlashInfer:
        """Return what stands for the library."""
        recorder = self

        class Wrapper:
            def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
                self.int_workspace_buffer = int_workspace_buffer
                self._pin_memory_int_workspace_buffer = torch.empty(0)

        class PrefillWrapper(Wrapper):
            def __init__(
                self,
                float_workspace_buffer,
                kv_layout="NHD",
                use_cuda_graph=False,
                qo_indptr_buf=None,
                paged_kv_indptr_buf=None,
                paged_kv_indices_buf=None,
                paged_kv_last_page_len_buf=None,
                custom_mask_buf=None,
                mask_indptr_buf=None,
                backend="auto",
                jit_args=None,
                jit_kwargs=None,
            ):
                recorder.note("PrefillWrapper", locals())

            def plan(
                self,
                qo_indptr,
                paged_kv_indptr,
                paged_kv_indices,
                paged_kv_last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim_qk,
                page_size,
                head_dim_vo=None,
                custom_mask=None,
                packed_custom_mask=None,
                causal=False,
                pos_encoding_mode="NONE",
                use_fp16_qk_reduction=False,
                sm_scale=None,
                window_left=-1,
                logits_soft_cap=None,
                rope_scale=None,
                rope_theta=None,
                q_data_type="float16",
                kv_data_type=None,
                o_data_type=None,
                non_blocking=True,
                prefix_len_ptr=None,
                token_pos_in_items_ptr=None,
                token_pos_in_items_len=0,
                max_item_len_ptr=None,
                seq_lens=None,
                seq_lens_q=None,
                block_tables=None,
                max_token_per_sequence=None,
                max_sequence_kv=None,
                fixed_split_size=None,
                disable_split_kv=False,
            ):
                recorder.note("prefill plan", locals() | {"pinned": self._pin_memory_int_workspace_buffer})

            def run(
                self,
                q,
                paged_kv_cache,
                *args,
                q_scale=None,
                k_scale=None,
                v_scale=None,
                out=None,
                lse=None,
                return_lse=False,
                enable_pdl=None,
                window_left=None,
                sinks=None,
                kv_cache_sf=None,
                skip_softmax_threshold_scale_factor=None,
            ):
                recorder.note("prefill run", locals())
                out.zero_()

        class DecodeWrapper(Wrapper):
            def __init__(
                self,
                float_workspace_buffer,
                kv_layout="NHD",
                use_cuda_graph=False,
                use_tensor_cores=False,
                paged_kv_indptr_buffer=None,
                paged_kv_indices_buffer=None,
                paged_kv_last_page_len_buffer=None,
                backend="auto",
                jit_args=None,
            ):
                recorder.note("DecodeWrapper", locals())

            def plan(
                self,
                indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                pos_encoding_mode="NONE",
                window_left=-1,
                logits_soft_cap=None,
                q_data_type="float16",
                kv_data_type=None,
                o_data_type=None,
                data_type=None,
                sm_scale=None,
                rope_scale=None,
                rope_theta=None,
                non_blocking=True,
                block_tables=None,
                seq_lens=None,
                fixed_split_size=None,
                disable_split_kv=False,
                q_len_per_req=1,
            ):
                recorder.note("decode plan", locals() | {"pinned": self._pin_memory_int_workspace_buffer})

            def run(
                self,
                q,
                paged_kv_cache,
                *args,
                q_scale=None,
                k_scale=None,
                v_scale=None,
                out=None,
                lse=None,
                return_lse=False,
                enable_pdl=None,
                window_left=None,
                sinks=None,
                q_len_per_req=None,
                skip_softmax_threshold_scale_factor=None,
                kv_cache_sf=None,
            ):
                recorder.note("decode run", locals())

        def fast_decode_plan(
            self,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode="NONE",
            window_left=-1,
            logits_soft_cap=None,
            q_data_type=None,
            kv_data_type=None,
            data_type=None,
            sm_scale=None,
            rope_scale=None,
            rope_theta=None,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
            global_override_indptr_cpu=None,
        ):
            recorder.note("fast plan", locals() | {"pinned": self._pin_memory_int_workspace_buffer})

        return FlashInfer("0.6.14", PrefillWrapper, DecodeWrapper, fast_decode_plan)


def numbers(tensor: Tensor) -> list[int]:
    """Return a tensor of int32 as a list."""
    assert tensor.dtype == torch.int32
    return tensor.tolist()
