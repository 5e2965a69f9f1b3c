"""What our code asks Triton to launch, kept instead of done, and what the launches would compile to for a GPU; its
interpreter, as exact as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(kernel, arguments, options)."""


@contextmanager
def interpreted_bfloat16() -> Iterator[None]:
    """Triton's interpreter multiplies the bits of bfloat16 numbers and cuts float32 ones off: here it multiplies their
    values, and rounds to the nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return SimpleNamespace(data=(handle.data.astype(np.uint32) << 16).view(np.float32), dtype=tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_dot", create_dot)
        patch.setattr(builder, "cast_impl", cast_impl)
        # Made from cast_impl when the class was.
        patch.setattr(builder, "create_fp_trunc", cast_impl)
        yield


@contextmanager
def ordered_products() -> Iterator[None]:
    """In Triton's interpreter a BLAS multiplies, which may give a row other bits at another place of its tile: here, as
    on a GPU, it has the same everywhere."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return interpreter.TensorHandle(np.einsum("ik,kj->ij", a.data, b.data) + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


def assert_compiles(module: str, capability: int, cache: Path) -> None:
    """`compile_kernels(capability)` of a test's module ends well where Triton's interpreter isn't on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", f"from {module} import compile_kernels; compile_kernels({capability})"],
        cwd=Path(__file__).parents[2], env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr


class LaunchRecorder:
    """Stands in for a kernel: keeps each launch."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> Any:
    """What a launch with these arguments would compile to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {n: v for n, v in kwargs.items() if n not in options}
    assert values.keys() == set(kernel.arg_names)
    pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    pointers[torch.float64] = "*fp64"
    signature, aligned = {}, {}
    for number, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (_is_one(value) and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            continue
        signature[parameter.name] = pointers[value.dtype] if isinstance(value, Tensor) else _scalar(value)
        address = value.data_ptr() if isinstance(value, Tensor) else value
        # As a launch does: what is a multiple of 16 is known to be one, as is a 1.
        if not parameter.do_not_specialize and isinstance(address, int) and address % 16 == 0:
            aligned[number,] = [["tt.divisibility", 16]]
    assert aligned
    constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
    return triton.compile(ASTSource(kernel, signature, constants, aligned), GPUTarget("cuda", capability, 32), options)


def _scalar(value: int | float) -> str:
    return "fp32" if isinstance(value, float) else "i32"


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1
