"""DecodeGraphs on a CPU: in a graph's stead, a tape runs recorded operations again on the memory that they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

from rollout.kernels.attention import cuda
from rollout.kernels.attention.base import AttentionBackend, RaggedBatch, serving
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.model.graphs import CudaGraphs, DecodeGraphs, Graph, bucket_sizes, pad_decodes
from rollout.model.parameters import ModelParameters
from tests.support import tiny_models
from tests.support.model_lab import plug_in

CPU = torch.device("cpu")
NO_CAPTURE = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""What waits for the device: CUDA refuses it in a capture."""


class Tape(TorchDispatchMode):
    """Records tensor operations with the memory they touch, as a CUDA graph does; no Python runs again.

    Launches of Triton's interpreter are no tensor operations: each is recorded whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Callable[[], Any], Any]] = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        run = InterpretedFunction.run

        def recorded(kernel: InterpretedFunction, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                self.record(partial(run, kernel), args, kwargs)

        self._patch.setattr(InterpretedFunction, "run", recorded)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in NO_CAPTURE:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        return self.record(func, args, kwargs or {})

    def record(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        # A parameter object may be given other memory later; a detached one stays where it is.
        baked_args, baked_kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        self.steps.append((lambda: func(*baked_args, **baked_kwargs), output))
        return output

    def replay(self) -> None:
        for step, output in self.steps:
            for old, new in zip(tree_leaves(output), tree_leaves(step()), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (30, [1, 2, 4, 8, 16, 24, 30])],
)
def test_bucket_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert bucket_sizes(max_num_seqs) == sizes


def test_large_buckets_grow_by_16() -> None:
    sizes = bucket_sizes(500)
    assert sizes[-1] == 500
    assert max(b - a for a, b in pairwise(sizes)) == 16
    assert next(a for a, b in pairwise(sizes) if b - a == 16) == 256


def test_padding_decodes_on_the_null_block() -> None:
    batch = RaggedBatch([0, 1, 2], [9, 4], [[3, 1, 2], [5]])
    padded = pad_decodes(batch, 4)
    assert padded.query_start.tolist() == [0, 1, 2, 3, 4]
    assert padded.context_lens.tolist() == [9, 4, 1, 1]
    assert padded.block_tables.tolist() == [[3, 1, 2], [5, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert padded.slots(4)[2:].tolist() == [0, 0]


class Lab:
    """One layer of a tiny Llama on TritonAttention, two sets of parameters for it, and DecodeGraphs that tape."""

    def __init__(self) -> None:
        models = [tiny_models.model("llama", seed) for seed in (0, 1)]
        for model in models:
            model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
        self.sets = [[parameter.data.clone() for parameter in model.parameters()] for model in models]
        self.model = models[0]
        shapes = plug_in(self.model)
        limits = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        self.backend = cuda.TritonAttention(shapes, 24, 4, torch.float32, CPU, **limits)
        self.reference = TorchAttention(shapes, 24, 4, torch.float32, CPU)
        self.captures = 0
        self.captured: list[dict[int, Graph]] = [{}, {}]
        self.graphs = DecodeGraphs(self.forward, self.backend, 4, self.capture)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, head_rows: Tensor, backend: AttentionBackend | None = None
    ) -> Tensor:
        with serving(backend or self.backend):
            output = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=head_rows
            )
        return output.logits[0]

    def capture(self, work: Callable[[], None]) -> Tape:
        self.captures += 1
        work()  # the warm-up
        with Tape() as tape:
            work()
        return tape

    def eager(self, ids: list[int], batch: RaggedBatch, backend: AttentionBackend) -> Tensor:
        backend.prepare(batch)
        rows = torch.arange(batch.num_tokens)
        return self.forward(torch.tensor([ids]), torch.from_numpy(batch.positions)[None], rows, backend)

    def flip(self, param_set: int) -> None:
        for parameter, data in zip(self.model.parameters(), self.sets[param_set], strict=True):
            parameter.data = data


@torch.inference_mode()
def test_replayed_decodes_agree_with_eager_ones_under_both_parameter_sets() -> None:
    lab = Lab()
    lengths, tables = [5, 3, 9, 1], [[7, 2, 11, 20], [1, 9, 14], [5, 3, 8, 4], [6, 10, 15]]
    prompts = RaggedBatch([0, 5, 8, 17, 18], list(lengths), tables)
    for backend in (lab.backend, lab.reference):
        lab.eager(list(range(10, 28)), prompts, backend)
    for number in (0, 1):
        lab.flip(number)
        lab.graphs.capture_all(lab.captured[number])
    assert lab.captures == 2 * len(bucket_sizes(4))
    # Flips, batches that shrink and grow, and each graph again after another one ran and contexts moved on.
    for step, (param_set, rows) in enumerate([(0, 3), (0, 1), (1, 3), (1, 4), (0, 3), (0, 1), (1, 4)]):
        lab.flip(param_set)
        chosen = [(step + i) % 4 for i in range(rows)]
        for i in chosen:
            lengths[i] += 1
        batch = RaggedBatch(list(range(rows + 1)), [lengths[i] for i in chosen], [tables[i] for i in chosen])
        ids = [30 + 7 * step + i for i in range(rows)]
        logits = lab.graphs.run(lab.captured[param_set], torch.tensor(ids), torch.from_numpy(batch.positions), batch)
        torch.testing.assert_close(logits, lab.eager(ids, batch, lab.reference), atol=1e-4, rtol=0)
        assert lab.graphs.replays == step + 1
    assert lab.captures == 2 * len(bucket_sizes(4))


@torch.inference_mode()
def test_positions_of_a_larger_batch_stayed_behind_a_smaller_one() -> None:
    """A model whose rotary factors follow the largest position of its batch would have been told of them."""
    lab = Lab()
    decodes, graphs = lab.graphs, lab.captured[0]
    decodes.capture_all(graphs)
    for contexts in ([9, 8, 7], [5], [4, 3, 2]):
        batch = RaggedBatch([*range(len(contexts) + 1)], contexts, [[1, 2, 3]] * len(contexts))
        decodes.run(graphs, torch.zeros(len(contexts), dtype=torch.int64), torch.from_numpy(batch.positions), batch)
        expected = [length - 1 for length in contexts] + [0] * (4 - len(contexts))
        assert decodes._positions[0].tolist() == expected


@torch.inference_mode()
def test_a_graph_replays_the_weights_that_a_commit_by_copy_has_brought() -> None:
    lab = Lab()
    parameters = ModelParameters(lab.model, "copy")
    batch = RaggedBatch([0, 1], [1], [[3]])
    seen = []
    lab.graphs.capture_all(parameters.live.graphs)
    for seed in (0, 1, 0):
        staged = parameters.new_set()
        for tensor, data in zip(staged.tensors.values(), lab.sets[seed], strict=True):
            tensor.copy_(data)
        parameters.commit(staged)
        logits = lab.graphs.run(parameters.live.graphs, torch.tensor([9]), torch.tensor([0]), batch)
        torch.testing.assert_close(logits, lab.eager([9], batch, lab.reference), atol=1e-4, rtol=0)
        seen.append(logits.clone())
    assert lab.captures == len(bucket_sizes(4))
    assert not torch.equal(seen[0], seen[1])


@torch.inference_mode()
def test_batches_that_do_not_qualify_run_eagerly() -> None:
    lab = Lab()
    graphs: dict[int, Graph] = {4: Tape()}
    chunk = RaggedBatch([0, 2, 3], [2, 1], [[1], [2]])
    many = RaggedBatch(list(range(6)), [1] * 5, [[i] for i in range(1, 6)])
    for batch in (chunk, many):
        ids = torch.zeros(batch.num_tokens, dtype=torch.long)
        assert lab.graphs.run(graphs, ids, torch.from_numpy(batch.positions), batch) is None
    assert lab.captures == 0


class Syncing(nn.Module):
    """A model that looks at a value, as mixture-of-experts loops do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, head_rows: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(head_rows), 8), input_ids.sum().item())


def test_a_model_that_cannot_be_captured_is_reported_once_and_left_eager(caplog: pytest.LogCaptureFixture) -> None:
    lab, model = Lab(), Syncing()
    graphs, captured = DecodeGraphs(model, lab.backend, 4, lab.capture), dict[int, Graph]()
    graphs.capture_all(captured)
    batch = RaggedBatch([0, 1], [1], [[1]])
    assert graphs.run(captured, torch.tensor([5]), torch.tensor([0]), batch) is None
    assert model.calls == 2  # the warm-up and the capture that failed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not permitted when stream is capturing" in caplog.text


class ShortMemory:
    """A capture, in the place of CudaGraphs, that is out of memory now and then."""

    def __init__(self, failures: list[bool]) -> None:
        self.failures, self.captures = failures, 0

    def __call__(self, work: Callable[[], None]) -> Graph:
        self.captures += 1
        if self.failures.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Tape()


@pytest.mark.parametrize(
    ("failures", "captured", "serving"),
    [
        ([False, False, False], {4, 2, 1}, {1: 1, 2: 2, 3: 4}),  # largest first
        ([True, False, False, False], {4, 2, 1}, {1: 1, 2: 2, 3: 4}),  # again after torch gave back what it kept
        ([True, True, False, False], {2, 1}, {1: 1, 2: 2, 3: None}),
        ([False, True, True, False], {4, 1}, {1: 1, 2: 4, 3: 4}),
    ],
)
def test_graphs_stay_on_after_a_capture_that_was_out_of_memory(
    failures: list[bool], captured: set[int], serving: dict[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    lab = Lab()
    capture = ShortMemory(list(failures))
    graphs, made = DecodeGraphs(lab.forward, lab.backend, 4, capture), dict[int, Graph]()
    graphs.capture_all(made)
    assert set(made) == captured
    assert capture.captures == len(failures)
    assert len(emptied) == any(failures)
    replayed: list[int] = []
    for size, graph in made.items():
        graph.replay = lambda size=size: replayed.append(size)  # type: ignore[method-assign]
    for rows, size in serving.items():
        batch = RaggedBatch(list(range(rows + 1)), [1] * rows, [[1 + i] for i in range(rows)])
        replayed.clear()
        graphs.run(made, torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long), batch)
        assert replayed == ([] if size is None else [size])


class FakeCuda:
    """torch.cuda as far as a capture needs it; ending one fails, and leaves its stream in place as torch's does."""

    class Stream:
        def __init__(self, device: object = None) -> None: ...

        def wait_stream(self, other: object) -> None: ...

    class CUDAGraph: ...

    def __init__(self) -> None:
        self.now: FakeCuda.Stream = self.Stream()
        self.fails = True

    def current_stream(self, device: object = None) -> Stream:
        return self.now

    def set_stream(self, stream: Stream) -> None:
        self.now = stream

    def graph_pool_handle(self) -> object:
        return object()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph: object, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.now = before


def test_after_a_capture_that_failed_the_engine_is_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    before, capture = fake.now, CudaGraphs(CPU)
    stream = capture._stream
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(lambda: None)
    assert fake.now is before
    assert capture._stream is not stream  # the old one may still be capturing
    fake.fails = False
    capture(lambda: None)
    assert fake.now is before
