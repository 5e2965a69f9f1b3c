"""The CUDA backends. Without a GPU, Triton's interpreter runs the kernels, and its compiler shows that they compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.kernels.attention import cuda
from rollout.kernels.attention.base import AttentionBackend, AttentionParams, LayerShape, RaggedBatch
from rollout.kernels.attention.torch_paged import TorchAttention
from tests.kernels.test_attention import Harness, History, dense

triton = pytest.importorskip("triton")  # has no wheels beyond Linux; the dev extra brings it there

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPLIT = 64
LIMITS = {"max_model_len": 5 * SPLIT, "max_num_seqs": 8, "max_num_batched_tokens": 512}


@pytest.fixture(autouse=True, scope="module")
def _short_splits() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "MIN_SPLIT_SIZE", SPLIT)
        yield


class TritonHarness(Harness):
    """test_attention's harness around TritonAttention: every slot, the null block's too, starts as NaN."""

    def __init__(self, shape: LayerShape, groups: int, block_size: int, params: AttentionParams, seed: int) -> None:
        super().__init__(shape, groups, block_size, params, seed)
        num_blocks = self.backend.num_blocks
        self.backend = cuda.TritonAttention([shape], num_blocks, block_size, torch.float32, DEVICE, **LIMITS)
        for cache in (self.backend.keys[0], self.backend.values[0]):
            cache.fill_(torch.nan)

    def normal(self, *size: int) -> Tensor:
        return super().normal(*size).to(DEVICE)

    def past(self, count: int) -> History:
        """A sequence whose first `count` positions are in the cache, by no attention: the interpreter is slow."""
        history, shape = self.new(), self.shape
        history.keys = self.normal(shape.num_kv_heads, count, shape.key_dim)
        history.values = self.normal(shape.num_kv_heads, count, shape.value_dim)
        history.blocks = [self.free.pop() for _ in range(-(-count // self.block_size))]
        if count:
            self.backend.prepare(RaggedBatch([0, count], [count], [history.blocks]))
            self.backend._write(0, history.keys, history.values)
        return history


@st.composite
def harnesses(draw: st.DrawFn) -> TritonHarness:
    shape = LayerShape(draw(st.integers(1, 2)), draw(st.sampled_from([8, 24])), draw(st.sampled_from([8, 20])))
    groups = draw(st.sampled_from([1, 3, 4]))
    sinks = torch.linspace(-1, 3, groups * shape.num_kv_heads, device=DEVICE) if draw(st.booleans()) else None
    window = draw(st.none() | st.sampled_from([1, 7, SPLIT - 1, SPLIT, 100]))
    params = AttentionParams(0.4, window, draw(st.sampled_from([None, 2.0])), sinks)
    return TritonHarness(shape, groups, draw(st.sampled_from([4, 16, 128])), params, draw(st.integers(0, 99)))


# (positions in the cache, tokens to compute) of each sequence
lengths_of = st.lists(st.tuples(st.integers(0, 3 * SPLIT), st.sampled_from([1, 1, 2, 9])), min_size=1, max_size=3)
no_shrinking = [Phase.reuse, Phase.generate]  # in the interpreter it would take minutes


@settings(max_examples=12, deadline=None, phases=no_shrinking)
@given(harnesses(), lengths_of)
def test_mixed_chunks_and_decodes_agree_with_dense_attention(
    harness: TritonHarness, lengths: list[tuple[int, int]]
) -> None:
    histories = [harness.past(past) for past, _ in lengths]
    harness.step([(history, tokens) for history, (_, tokens) in zip(histories, lengths, strict=True)])
    harness.step([(histories[-1], 1), (harness.fork(histories[0]), 1)])


def run(backend: cuda.TritonAttention, work: list[tuple[History, Tensor]], params: AttentionParams) -> list[Tensor]:
    """Each sequence's last tokens, whose queries are given, in one batch → its rows."""
    start = [0]
    for _, query in work:
        start.append(start[-1] + query.shape[1])
    backend.prepare(RaggedBatch(start, [h.length for h, _ in work], [h.blocks for h, _ in work]))
    keys = torch.cat([h.keys[:, -q.shape[1] :] for h, q in work], 1)
    values = torch.cat([h.values[:, -q.shape[1] :] for h, q in work], 1)
    output = backend.forward(0, torch.cat([q for _, q in work], 1), keys, values, params)
    return list(output.split([q.shape[1] for _, q in work]))


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.kernels.attention import triton_paged

    # Alone, a sequence's splits are spread over three programs, in the batch of four over one.
    monkeypatch.setattr(triton_paged, "FULL_GRID", 5)
    harness = TritonHarness(LayerShape(2, 24, 20), 3, 16, AttentionParams(0.4, window), seed=3)
    work = [
        (harness.past(length), harness.normal(harness.heads, tokens, 24))
        for length, tokens in [(280, 1), (33, 1), (120, 12), (1, 1)]
    ]
    together = run(harness.backend, work, harness.params)
    for i in range(4):
        assert torch.equal(run(harness.backend, [work[i]], harness.params)[0], together[i])
    pair = run(harness.backend, [work[2], work[0]], harness.params)
    assert torch.equal(pair[0], together[2])
    assert torch.equal(pair[1], together[0])


@pytest.mark.parametrize(("max_model_len", "context"), [(SPLIT, SPLIT - 4), (2 * SPLIT, SPLIT + 30)])
def test_half_precision_with_and_without_splits(max_model_len: int, context: int) -> None:
    harness = Harness(LayerShape(2, 16, 16), 2, 16, AttentionParams(0.25), seed=4)
    limits = {**LIMITS, "max_model_len": max_model_len}
    backend = cuda.TritonAttention([harness.shape], 64, 16, torch.float16, DEVICE, **limits)
    work, expected = half_precision_work(harness, [(context, context), (9, 9)], 16)
    for got, want in zip(run(backend, work, harness.params), expected, strict=True):
        torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=0)
    decodes = [(history, query[:, -1:]) for history, query in work]
    for got, want in zip(run(backend, decodes, harness.params), expected, strict=True):
        torch.testing.assert_close(got.float(), want[-1:], atol=3e-3, rtol=0)


def half_precision_work(
    harness: Harness, lengths: list[tuple[int, int]], block_size: int
) -> tuple[list[tuple[History, Tensor]], list[Tensor]]:
    """Random float16 sequences of (context, query) lengths, and what dense float32 attention makes of them."""
    work, expected, free = [], [], list(range(1, 64))
    for context, tokens in lengths:
        kv_heads, dim = harness.shape.num_kv_heads, harness.shape.key_dim
        keys, values = (harness.normal(kv_heads, context, dim).half() for _ in range(2))
        query = harness.normal(harness.heads, tokens, dim).half()
        history = History(keys.to(DEVICE), values.to(DEVICE), [free.pop() for _ in range(-(-context // block_size))])
        work.append((history, query.to(DEVICE)))
        expected.append(dense(query.float(), keys.float(), values.float(), harness.params).to(DEVICE))
    return work, expected


def test_a_batch_that_exceeds_the_buffers_is_refused() -> None:
    buffers = cuda.StepBuffers(max_num_tokens=8, max_num_seqs=2, table_width=3, device=DEVICE)
    buffers.fill(RaggedBatch([0, 7, 8], [7, 12], [[1, 2], [3, 4, 5]]), 4)
    for batch in (
        RaggedBatch([0, 9], [9], [[1, 2, 3]]),
        RaggedBatch([0, 1, 2, 3], [1, 1, 1], [[1], [2], [3]]),
        RaggedBatch([0, 1], [13], [[1, 2, 3, 4]]),
    ):
        with pytest.raises(ValueError, match="made for 8, 2 and 3"):
            buffers.fill(batch, 4)


# -- flash-attn, by a stand-in with its signatures and its definition of a paged, causal, windowed softmax


class FakeFlash:
    def __init__(self) -> None:
        self.varlen_calls = self.kvcache_calls = 0

    def flash_attn_varlen_func(  # noqa: PLR0913
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.varlen_calls += 1
        assert causal
        assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
        queries = q.split(cu_seqlens_q.diff().tolist())
        return torch.cat(
            self._each(queries, k, v, cu_seqlens_k.diff(), block_table, softmax_scale, window_size, softcap)
        )

    def flash_attn_with_kvcache(  # noqa: PLR0913
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, rotary_cos: None = None,
        rotary_sin: None = None, cache_seqlens: Tensor | None = None, cache_batch_idx: None = None,
        cache_leftpad: None = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        self.kvcache_calls += 1
        assert causal
        assert q.ndim == 4
        return torch.stack(
            self._each(list(q), k_cache, v_cache, cache_seqlens, block_table, softmax_scale, window_size, softcap)
        )

    def _each(
        self, queries: Any, k: Tensor, v: Tensor, lengths: Any, tables: Any, scale: Any, window: tuple, softcap: float
    ) -> list[Tensor]:
        assert k.shape[1] % 256 == 0
        assert lengths.dtype == tables.dtype == torch.int32
        assert len(queries) == len(lengths) == len(tables)
        assert window in ((-1, -1), (window[0], 0))  # (left, right), both counted without the query itself
        params = AttentionParams(scale, None if window[0] < 0 else window[0] + 1, softcap or None)
        outputs = []
        for query, length, table in zip(queries, lengths, tables, strict=True):
            key, value = (cache[table.long()].flatten(0, 1)[:length].transpose(0, 1).float() for cache in (k, v))
            outputs.append(dense(query.transpose(0, 1).float(), key, value, params).to(k.dtype))
        return outputs


@pytest.mark.parametrize(
    ("params", "served_by_flash"),
    [
        (AttentionParams(0.25), True),
        (AttentionParams(0.25, window=9, softcap=1.5), True),
        (AttentionParams(0.25, sinks=torch.linspace(-1, 3, 4, device=DEVICE)), False),
    ],
)
def test_flash_attn_serves_the_layers_it_can(
    params: AttentionParams, served_by_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeFlash()
    monkeypatch.setitem(sys.modules, "flash_attn", fake)
    harness = Harness(LayerShape(2, 16, 16), 2, 16, params, seed=5)
    backend = cuda.FlashAttention([harness.shape], 64, 256, torch.float16, DEVICE, **LIMITS)
    work, expected = half_precision_work(harness, [(40, 40), (18, 18), (1, 1)], 256)
    for got, want in zip(run(backend, work, params), expected, strict=True):
        torch.testing.assert_close(got.float(), want, atol=3e-3, rtol=0)
    decodes = [(history, query[:, -1:]) for history, query in work]
    for got, want in zip(run(backend, decodes, params), expected, strict=True):
        torch.testing.assert_close(got.float(), want[-1:], atol=3e-3, rtol=0)
    assert (fake.varlen_calls, fake.kvcache_calls) == ((1, 1) if served_by_flash else (0, 0))


def test_flash_attn_refuses_small_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 256 tokens, block_size is 16"):
        cuda.FlashAttention([], 2, 16, torch.float16, DEVICE, **LIMITS)


@pytest.mark.parametrize(
    ("device", "block_size", "installed", "expected"),
    [
        ("cpu", 256, {"flash_attn", "triton"}, "TorchAttention"),
        ("cuda", 256, {"flash_attn", "triton"}, "FlashAttention"),
        ("cuda", 16, {"flash_attn", "triton"}, "TritonAttention"),
        ("cuda", 256, {"triton"}, "TritonAttention"),
        ("cuda", 16, set(), "TorchAttention"),
    ],
)
def test_auto_takes_the_best_backend_there_is(
    device: str, block_size: int, installed: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=installed.__contains__)))
    for name in ("TorchAttention", "FlashAttention", "TritonAttention"):
        monkeypatch.setattr(cuda, name, lambda *args, name=name, **limits: name)
    assert cuda.choose("auto", [], 2, block_size, torch.float32, torch.device(device), **LIMITS) == expected


def test_cuda_backends_are_refused_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="'triton' needs a CUDA device, got cpu"):
        cuda.choose("triton", [], 2, 16, torch.float32, cpu, **LIMITS)
    backend: AttentionBackend = cuda.choose("torch", [], 2, 16, torch.float32, cpu, **LIMITS)
    assert type(backend) is TorchAttention


# -- Triton's compiler, which needs no GPU, on the very launches that paged_attention makes


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.long)])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-c",
        f"from tests.kernels import test_cuda_attention as t; t.compile_kernels({capability})",
    ]
    subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**env, "TRITON_CACHE_DIR": str(tmp_path)}, check=True, timeout=240
    )


def compile_kernels(capability: int) -> None:
    """Compile a mixed batch's launches; tensor cores must be used, and shared memory must fit a consumer's GPU."""
    from rollout.kernels.attention import triton_paged

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    for name in ("_attend", "_merge_splits"):
        setattr(triton_paged, name, LaunchRecorder(getattr(triton_paged, name), launches))
    query, keys, values = (
        torch.zeros(size, dtype=torch.bfloat16) for size in ((8, 20, 64), (9, 16, 2, 64), (9, 16, 2, 40))
    )
    lens = torch.zeros(3, dtype=torch.int32)
    params = AttentionParams(0.1, window=100, softcap=2.0, sinks=torch.zeros(8, dtype=torch.bfloat16))
    triton_paged.paged_attention(
        query, keys, values, lens, lens[1:], torch.zeros(2, 5, dtype=torch.int32), params,
        split_size=256, max_splits=4, has_decodes=True, has_chunks=True,
    )  # fmt: skip
    chunk, decode, merge = (compile_launch(*launch, capability) for launch in launches)
    for compiled in (chunk, decode):
        assert "wgmma" in compiled.asm["ptx"] or "mma.sync" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 99 * 1024
    assert merge.asm["cubin"]


class LaunchRecorder:
    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((self.kernel, args, kwargs))


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> Any:
    """What a launch with these arguments would compile to."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    assert values.keys() == set(kernel.arg_names)
    pointers = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
    signature = {}
    for parameter in kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
        else:
            signature[parameter.name] = pointers[value.dtype] if isinstance(value, Tensor) else _scalar(value)
    constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
    return triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32), options)


def _scalar(value: int | float) -> str:
    return "fp32" if isinstance(value, float) else "i32"
