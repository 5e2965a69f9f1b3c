"""The proof at start: it names the operation that sees its batch, and no server claims what it can't keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from rollout.config import EngineConfig
from rollout.engine.process import run_engine
from rollout.fleet.client import EngineClient
from rollout.fleet.connection import processes
from rollout.fleet.errors import EngineError
from rollout.kernels.attention.native_paged import NativeAttention
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.model.invariance import NotInvariantError
from tests.support import tiny_models
from tests.support.exact_rollouts import DTYPES, exact_engine

SLIGHT = {"float32": 1e-5, "bfloat16": 3e-4}
"""Too little for the load's own comparison with stock attention, enough to move bits."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama"))


def spoil_norm(dtype: str = "float32") -> Callable[..., Tensor]:
    """A norm that also subtracts a little of its batch's mean."""
    original = LlamaRMSNorm.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return original(self, hidden - SLIGHT[dtype] * hidden.mean(1, keepdim=True))

    return forward


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_module_that_sees_its_batch_is_named(
    dtype: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaRMSNorm, "forward", spoil_norm(dtype))
    with pytest.raises(
        NotInvariantError, match=r"a token's bits depend on its batch in model\.layers\.0\.input_layernorm \(LlamaRMS"
    ):
        exact_engine(llama, dtype)
    exact_engine(llama, dtype, batch_invariant=False)


def test_a_module_of_the_middle_is_named_by_its_parts(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaMLP.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return original(self, hidden + SLIGHT["float32"] * hidden.mean(1, keepdim=True))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(NotInvariantError, match=r"batch in model\.layers\.0\.mlp\.gate_proj \(Linear\), model\.layers"):
        exact_engine(llama)


@pytest.mark.parametrize("kind", [TorchAttention, NativeAttention])
def test_attention_that_sees_its_batch_is_named(kind: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kind.forward

    def forward(self: Any, layer: int, query: Tensor, *args: Any) -> Tensor:
        output = original(self, layer, query, *args)
        return output + SLIGHT["float32"] * output.mean(0, keepdim=True) if layer == 1 else output

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(NotInvariantError, match=r"batch in attention of layer 1 \(rollout's attention\), model\.lay"):
        exact_engine(llama, attention_backend="native" if kind is NativeAttention else "torch")


def run_spoiled_engine(config: EngineConfig, *addresses: Any, **kwargs: Any) -> None:
    """The engine process of a machine on which a norm sees its batch."""
    LlamaRMSNorm.forward = spoil_norm()
    run_engine(config, *addresses, **kwargs)


def test_the_server_refuses_to_start_and_says_why(llama: Path) -> None:
    async def start() -> None:
        config = EngineConfig(model=str(llama), dtype="float32", device="cpu", batch_invariant=True)
        client = EngineClient(config, start_engine=processes(run_spoiled_engine))
        client.start()
        try:
            await client.wait_ready(120)
        finally:
            await client.stop()

    with pytest.raises(EngineError, match=r"model\.layers\.0\.input_layernorm.*Serve without --batch-invariant"):
        asyncio.run(start())
