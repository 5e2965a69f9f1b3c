"""The grouped product of experts against transformers' loop over them.

Without a GPU, Triton's interpreter runs the kernels, and its compiler shows that they compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.auto import CONFIG_MAPPING
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.support.triton_launches import (
    Launch,
    LaunchRecorder,
    assert_compiles,
    compile_launch,
    interpreted_bfloat16,
)

triton = pytest.importorskip("triton")  # has no wheels beyond Linux; the dev extra brings it there

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True, scope="module")
def _bfloat16() -> Iterator[None]:
    with interpreted_bfloat16():
        yield


def experts(kind: type, dtype: torch.dtype, *, num_experts: int, hidden: int, inner: int) -> Any:
    """The experts of a layer of transformers', with random weights and its own loop for an implementation."""
    model_type = "gpt_oss" if kind is GptOssExperts else "qwen3_moe"
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": inner}
    config = CONFIG_MAPPING[model_type](**sizes, num_experts=num_experts, num_local_experts=num_experts)
    config._experts_implementation = "eager"
    module = kind(config).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * hidden**-0.5)
    return module.to(DEVICE)


def routing(case: str, tokens: int, num_experts: int, top_k: int) -> Tensor:
    """(tokens, top_k) distinct experts of each token."""
    generator = torch.Generator().manual_seed(tokens)
    if case == "all on the last ones":
        return torch.arange(num_experts - top_k, num_experts).expand(tokens, top_k)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)])
    return ids.sort(-1, descending=True).values if case == "random" else ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("case", "kind", "tokens", "num_experts", "top_k", "hidden", "inner"),
    [
        ("random", Qwen3MoeExperts, 1, 8, 1, 40, 24),  # most experts have no token, one has one
        ("random", Qwen3MoeExperts, 37, 6, 3, 72, 136),  # no size is a multiple of a block
        ("all on the last ones", Qwen3MoeExperts, 50, 40, 2, 64, 64),
        ("random", Qwen3MoeExperts, 70, 2, 2, 72, 48),  # enough rows for the larger tiles
        ("random", GptOssExperts, 21, 4, 2, 72, 40),  # transposed, with biases, and a gate of its own
    ],
)
def test_experts_agree_with_the_loop(
    dtype: torch.dtype, case: str, kind: type, tokens: int, num_experts: int, top_k: int, hidden: int, inner: int
) -> None:
    from rollout.kernels.triton_experts import experts_forward

    module = experts(kind, dtype, num_experts=num_experts, hidden=hidden, inner=inner)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, dtype)
    chosen = routing(case, tokens, num_experts, top_k).to(DEVICE)
    weights = torch.rand(tokens, top_k, generator=generator).to(DEVICE, dtype)
    got, want = experts_forward(module, x, chosen, weights), module(x, chosen, weights)
    assert got.dtype is dtype
    # In bfloat16 both round, if not in all places: two roundings of what the largest sum is.
    limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[dtype] * want.abs().max().item()
    torch.testing.assert_close(got, want, atol=limit, rtol=0)


def test_rows_are_sorted_by_expert_and_each_group_fills_whole_tiles() -> None:
    from rollout.kernels.triton_experts import CHUNK, SortedRows

    chosen = torch.tensor([3, 1, 3, 0, 3, 1] * (CHUNK // 5)).to(DEVICE)  # crosses a chunk; expert 2 has no row
    for ids in (chosen, chosen[:1], chosen[:7].int()):
        rows = SortedRows.of(ids, num_experts=4)
        tiles = rows.order.view(-1, rows.tile)[: len(rows.owners)].tolist()
        seen: list[int] = []
        for owner, tile in zip(rows.owners.tolist(), tiles, strict=True):
            held = [row for row in tile if row < len(ids)]
            assert owner == -1 or (held and tile == held + [len(ids)] * (rows.tile - len(held)))
            seen += [row for row in held if owner >= 0]
            assert owner == -1 or {int(ids[row]) for row in held} == {owner}
        assert seen == ids.argsort(stable=True).tolist()


# -- Triton's compiler, which needs no GPU, on the very launches that experts_forward makes


@pytest.mark.parametrize("capability", [80, *(pytest.param(sm, marks=pytest.mark.long) for sm in (90, 100))])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    assert_compiles("tests.kernels.test_triton_experts", capability, tmp_path)


def compile_kernels(capability: int) -> None:
    """Compile what few and many rows launch: shared memory fits a consumer's GPU, bfloat16 uses tensor cores."""
    from rollout.kernels import triton_experts

    launches: list[Launch] = []
    for name in ("_sort_by_expert", "_grouped_product"):
        setattr(triton_experts, name, LaunchRecorder(getattr(triton_experts, name), launches))
    for dtype, tokens in ((torch.bfloat16, 800), (torch.float32, 4)):
        launches.clear()
        module = experts(Qwen3MoeExperts, dtype, num_experts=8, hidden=128, inner=64)
        chosen = torch.zeros(tokens, 2, dtype=torch.int64)
        triton_experts.experts_forward(module, torch.zeros(tokens, 128, dtype=dtype), chosen, chosen.to(dtype))
        sort, *products = (compile_launch(*launch, capability) for launch in launches)
        assert sort.asm["cubin"]
        assert len(products) == 2
        for product in products:
            assert product.metadata.shared <= 99 * 1024
            assert dtype is torch.float32 or "wgmma" in product.asm["ptx"] or "mma" in product.asm["ptx"]
