"""CUDA tensors without a GPU: torch's FakeTensorMode computes shapes, dtypes and devices, and no values.

A CPU build of torch has no guard for CUDA devices, which FakeTensorMode asks for: a stand-in of two lines, compiled
against torch's own headers, is loaded in its place.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from triton.runtime.jit import KernelInterface

from rollout.kernels.attention.base import ATTENTION_NAME

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar guard(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""
CUDA = torch.device("cuda:0")
NO_LAUNCH = frozenset(
    {"alias", "as_strided", "chunk", "detach", "diagonal", "device", "empty", "empty_like", "empty_strided", "expand",
     "expand_as", "is_same_size", "lift_fresh", "new_empty", "permute", "_reshape_alias", "reshape", "select", "slice",
     "split", "split_with_sizes", "squeeze", "sym_size", "t", "transpose", "unbind", "unflatten", "flatten", "unfold",
     "unsqueeze", "_unsafe_view", "view"}
)  # fmt: skip
"""Operations that only look at a tensor otherwise, or make one without filling it."""


@functools.cache
def _load_guard() -> None:
    if torch.version.cuda is not None:
        return  # torch has its own
    folder = Path(tempfile.mkdtemp(prefix="rollout-guard-"))
    (folder / "guard.cpp").write_text(GUARD)
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", str(folder / "guard.cpp"),
        "-o", str(folder / "guard.so"), *[f"-I{path}" for path in cpp_extension.include_paths()],
        f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    ctypes.CDLL(str(folder / "guard.so"))


def cuda_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model in bfloat16 on the fake device, with the attention that the engine plugs in. In `fake_cuda`."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.eval().requires_grad_(False).set_attn_implementation(ATTENTION_NAME)
    return model  # type: ignore[no-any-return]


def fake_cuda() -> FakeTensorMode:
    """In this mode tensors may be made on "cuda": mixing devices and reading a value raise, as they would there."""
    _load_guard()
    return FakeTensorMode()


class Launches(TorchDispatchMode):
    """Counts what is launched on the device, by operation; `on_host` lists the operations that the host computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.on_host: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        devices = {t.device.type for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor)}
        if name not in NO_LAUNCH:
            self.counts[name] += "cuda" in devices
            if "cpu" in devices:
                self.on_host.append(name)
        return output

    def replace_kernels(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Count what Triton kernels of these modules are launched, by name, in place of launching it."""
        for module in modules:
            for name, kernel in vars(module).items():
                if isinstance(kernel, KernelInterface):
                    patch.setattr(module, name, _Counted(self, name))


class _Counted:
    def __init__(self, launches: Launches, name: str) -> None:
        self._launches, self._name = launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            assert {t.device.type for t in args if isinstance(t, Tensor)} == {"cuda"}
            self._launches.counts[self._name] += 1

        return launch
