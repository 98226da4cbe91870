"""Compile each kernel in Triton on a machine without a GPU: `python -m` this module CAPABILITY, such as 90.

The interpreter takes what the compiler refuses, such as a number that changes its type in a branch. Launches
are caught, and what they would compile is compiled.
"""

from __future__ import annotations

import re
import sys
from functools import partialmethod
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}
"""Of a processor's memory, what a program may take, by capability, as NVIDIA's programming guide has it."""
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def compile_launch(
    kernel: Any, capability: int, *args: object, grid: object, warmup: bool, **options: object
) -> None:
    """Compile what a launch would run."""
    names = [parameter.name for parameter in kernel.params]
    values = dict(zip(names, args, strict=False)) | {
        name: options.pop(name) for name in names if name in options
    }
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float) or parameter.do_not_specialize, (
                f"{parameter.name} is specialised on"
            )
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    name, shared = kernel.fn.__name__, compiled.metadata.shared
    assert shared <= SHARED_KIB[capability] << 10, f"{name} takes {shared} bytes of a processor's memory"
    ptx = compiled.asm["ptx"]
    waits = ptx.find("griddepcontrol.wait")
    assert (waits >= 0) == compiled.metadata.launch_pdl, f"{name}: only what is launched early waits"
    touched = re.search(r"\b(?:ld|st|red|atom)\.global|\bcp\.async", ptx)
    assert touched is not None, f"{name} does nothing"
    assert waits < touched.start(), f"{name} reads or writes before it waits"
    print(f"{name}: {len(compiled.asm['cubin'])} bytes", flush=True)  # noqa: T201 -- what the test reads


def main() -> None:
    """Launch each kernel with the shapes of models that are served."""
    capability = int(sys.argv[1])
    JITFunction.run = partialmethod(compile_launch, capability)
    from onbeat.engine.cuda import triton_draw, triton_ops
    from onbeat.engine.torch.kernels import BestBuffers, DecodeRows, DrawParams, LayerSpec, Norm, StepTensors
    from onbeat.engine.torch.kv import LayerKVCache

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> Tensor:
        return numbers(*shape, dtype=torch.int32)

    def norm(width: int, *, scales_rounded: bool) -> Norm:
        scale = numbers(width, dtype=torch.bfloat16 if scales_rounded else torch.float32)
        return Norm(scale, 1e-6, scales_rounded)

    for width, scales_rounded in ((4096, True), (1152, False)):
        residual = numbers(3, width)
        for x in (None, numbers(3, width)):
            triton_ops.add_norm(x, residual, norm(width, scales_rounded=scales_rounded), residual)
    triton_ops.act_mul(numbers(3, 2 * 14336), "silu", numbers(3, 14336))
    triton_ops.act_mul(numbers(3, 2 * 6912), "gelu_pytorch_tanh", numbers(3, 6912))
    for num_heads, num_kv_heads, head_dim in ((32, 8, 128), (9, 3, 64), (8, 4, 256)):
        for head_norm in (None, *(norm(head_dim, scales_rounded=each) for each in (True, False))):
            layer = LayerSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=1.0,
                window=None,
                frequencies_H=numbers(head_dim // 2, dtype=torch.float32),
                factors_H=numbers(head_dim // 2, dtype=torch.float32),
                sinks_N=None,
                query_norm=head_norm,
                key_norm=head_norm,
            )
            kv = LayerKVCache(*(numbers(2, num_kv_heads, 16, head_dim) for _ in range(2)))
            qkv = numbers(3, (num_heads + 2 * num_kv_heads) * head_dim)
            step = StepTensors(ints(3), ints(3))
            triton_ops.rope_store(qkv, step, layer, kv, numbers(3, num_heads, head_dim))
    if capability >= 89:
        triton_ops.in_fp8(numbers(3, 4096))
        triton_ops.in_fp8(numbers(3, 14336))
        kv = LayerKVCache(*(part.to(torch.float8_e4m3fn) for part in kv))
        triton_ops.rope_store(qkv, step, layer, kv, numbers(3, num_heads, head_dim))
    triton_ops.list_blocks(DecodeRows(ints(256, 64), ints(256)), 16, ints(257), ints(256 * 64), ints(256))
    logits, best = numbers(3, 128_256, dtype=torch.float32), BestBuffers(ints(3), torch.zeros(3))
    triton_draw.best(logits, best)
    doubles = numbers(3, dtype=torch.float64)
    triton_draw.draw(logits, DrawParams(doubles, ints(3), doubles, doubles, doubles), best, ints(3))


if __name__ == "__main__":
    main()
