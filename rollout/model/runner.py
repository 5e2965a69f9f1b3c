"""The model on its device: the ragged batch of a step goes in, the logits of the rows that matter come out."""

from __future__ import annotations

import logging
import time
from itertools import accumulate

import numpy as np
import psutil
import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.kernels.attention import native_paged as native
from rollout.kernels.attention.base import AttentionBackend, LayerShape, RaggedBatch, serving
from rollout.kernels.attention.chunked import CHUNK, fill_up, padded_rows
from rollout.kernels.attention.cuda import TritonAttention, has_triton
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.kernels.native import keep_freed_memory
from rollout.model import fused_cuda, invariance
from rollout.model.fused import PackedWeights, fuse_gates, fuse_norms, fuse_rotary, native_gate
from rollout.model.graphs import CudaGraphs, DecodeGraphs, bucket_sizes
from rollout.model.joined import JoinedWeights
from rollout.model.load_check import LENGTHS, plug_in_attention
from rollout.model.loader import eos_token_ids, experts_implementation, load_model
from rollout.model.memory import GRAPH_BYTES, SAMPLER_COPIES, MemoryNeeds, ReceivedBytes, peak_bytes
from rollout.model.model_config import resolve_device
from rollout.model.parameters import ModelParameters
from rollout.model.rotary import fix_rotary, longest_exact
from rollout.model.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
LOGIT_BYTES = 128 << 20
"""Most bytes of float32 logits in one step, beyond one row a sequence: bounds what prompt logprobs cost."""


class ModelRunner:
    """Loads the model, sizes the cache, and runs forward passes."""

    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.config = config
        keep_freed_memory()
        self._can_pin = torch.cuda.is_available()
        device = resolve_device(config)
        self._free_at_start = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
        self.model = load_model(config)
        self.eos_token_ids = eos_token_ids(config, self.model)
        loaded = time.perf_counter()
        self.device, self.dtype = self.model.device, self.model.dtype
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.max_model_len = self._longest()
        experts = experts_implementation(self.model, config)
        shapes, stock = plug_in_attention(self.model, self._backend, config.block_size, self.max_model_len, experts)
        fix_rotary(self.model, self.max_model_len)
        self.parameters = ModelParameters(self.model)
        self.packed: PackedWeights | JoinedWeights
        if self._serves_triton and config.tensor_parallel_size == 1:
            fuse = fused_cuda.make_invariant if config.batch_invariant else fused_cuda.fuse
            self.packed = fuse(self.parameters)
        else:
            fuse_norms(self.model)
            fuse_rotary(self.model)
            self.packed = PackedWeights(self.parameters)
            fuse_gates(self.model, native_gate, torch.equal)
        if config.batch_invariant:
            invariance.prove_batch_invariance(
                self.model, lambda blocks: self._backend(shapes, blocks), config.block_size
            )
        stock.check(self.model, lambda blocks: self._backend(shapes, blocks), config.block_size)
        self.routing: RoutedExperts | None = None
        self.graphs: DecodeGraphs | None = None
        self.adapted = False  # the next rows run on adapters, which no graph has
        self.num_blocks = self._num_blocks(shapes)
        if config.tensor_parallel_size > 1:
            from rollout.model.sharding import least

            self.num_blocks = least(self.num_blocks, self.device)
        capacity = (self.num_blocks - 1) * config.block_size
        if capacity < self.max_model_len:
            raise ValueError(
                f"the KV cache holds {capacity} tokens, fewer than max_model_len ({self.max_model_len}): "
                "raise --kv-cache-memory-bytes (or --num-gpu-blocks-override), or lower --max-model-len"
            )
        self.backend = self._backend(shapes, self.num_blocks)
        if config.enable_return_routed_experts:
            one = RaggedBatch([0, 1], [1], [[0]])  # a token in the null block
            self.routing = RoutedExperts(
                self.model,
                self.num_blocks,
                config.block_size,
                padded_rows(config.max_num_batched_tokens),
                probe=lambda: self.forward(np.zeros(1, np.int64), one, np.zeros(1, np.int64)),
            )
        self.capture()
        self.seconds = {"load": loaded - started, "check_and_cache": time.perf_counter() - loaded}

    @property
    def max_head_rows(self) -> int:
        return max(1, LOGIT_BYTES // (4 * self.vocab_size))

    def _longest(self) -> int:
        """The longest sequence, in tokens, that is served. Raises ValueError where it was set beyond what is exact."""
        name, asked = type(self.model).__name__, self.config.max_model_len
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if asked and limit and asked > limit:
            raise ValueError(f"max_model_len ({asked}) exceeds the model's own limit of {limit} positions")
        exact = longest_exact(self.model.config)
        if exact is None or exact >= (asked or limit or 2048):
            return asked or limit or 2048
        why = (
            f"beyond {exact} positions {name} gives all positions of a sequence other rotary factors than a shorter "
            "one has in its cache"
        )
        if asked:
            raise ValueError(f"max_model_len ({asked}) is too large: {why}. Set --max-model-len to at most {exact}")
        logger.warning("max_model_len is %d, not the model's own %s: %s", exact, limit, why)
        return exact

    def _num_blocks(self, shapes: list[LayerShape]) -> int:
        """How many blocks of cache: block 0, which is padding, and all that memory and need allow.

        Raises ValueError where a GPU's memory doesn't suffice, for the cache or for what comes beside it.
        """
        config = self.config
        block_bytes = config.block_size * sum(shape.bytes_per_token(self.dtype) for shape in shapes)
        per_sequence = -(-self.max_model_len // config.block_size)
        most = per_sequence * config.max_num_seqs
        asked = config.num_gpu_blocks_override
        if asked is None and config.kv_cache_memory_bytes:
            asked = min(config.kv_cache_memory_bytes // block_bytes, most)
        if self.device.type == "cuda":
            needs = self._memory_needs(shapes)
            if asked is None:
                asked = min(needs.blocks(block_bytes, 1 + per_sequence, config.gpu_memory_utilization) - 1, most)
            else:
                needs.check((1 + asked) * block_bytes, "the cache that was asked for")
        return 1 + (min(CPU_CACHE_BYTES // block_bytes, most) if asked is None else asked)

    def _memory_needs(self, shapes: list[LayerShape]) -> MemoryNeeds:
        """What a CUDA device has, and what this engine takes of it: a step of the most tokens is tried."""
        config, rows = self.config, self.config.max_num_seqs
        wholes = list(self.model.parameters())
        held = [getattr(whole, "_local_tensor", whole) for whole in wholes]  # this rank's share of it
        received, host_free = ReceivedBytes.of(held, wholes, config.weight_staging), psutil.virtual_memory().available
        if config.weight_staging == "host":
            received.check_host(host_free)
        self.backend = self._backend(shapes, 1)  # all of it in the null block: nothing of it is looked at

        def compute(lengths: list[int]) -> int:
            starts = [0, *accumulate(lengths)]
            tables = [[0] * -(-length // config.block_size) for length in lengths]
            head = np.array(starts[1:]) - 1
            batch = RaggedBatch(starts, lengths, tables)
            return peak_bytes(self.device, lambda: self.forward(np.zeros(starts[-1], np.int64), batch, head))

        whole, rest = divmod(config.max_num_batched_tokens, self.max_model_len)
        prefill = [self.max_model_len] * whole + [rest] * (rest > 0)
        step, decode = compute(prefill[:rows]), compute([1] * rows)
        logits = rows * self.vocab_size
        captured = decode + logits * self.dtype.itemsize + len(bucket_sizes(rows)) * GRAPH_BYTES
        del self.backend
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryNeeds(
            total=total,
            free=free,
            held=self._free_at_start - free,
            staging=received.staging,
            landing=received.landing,
            step=max(step, decode) + SAMPLER_COPIES * 4 * logits,
            graphs=captured * self._captures,
            pinned=received.pinned,
            host_free=host_free,
        )

    def _backend(self, shapes: list[LayerShape], num_blocks: int, dtype: torch.dtype | None = None) -> AttentionBackend:
        """The attention that serves, with caches in `dtype`: by default the model's."""
        dtype = dtype or self.dtype
        arguments = (shapes, num_blocks, self.config.block_size, dtype, self.device)
        name, exact = self.config.attention_backend, self.config.batch_invariant
        if name == "native" or (name == "auto" and native.serves(*arguments)):
            return native.NativeAttention(*arguments)
        if exact and name == "auto" and native.serves(shapes, num_blocks, native.LANES, dtype, self.device):
            raise ValueError(
                f"batch_invariant needs a block_size that is a multiple of {native.LANES} and divides {CHUNK}, "
                f"got {self.config.block_size}: a trainer's attention is in such blocks"
            )
        if name == "triton" and self.device.type != "cuda":
            raise ValueError(f"attention_backend triton serves CUDA devices, not {self.device}: use auto")
        if not self._serves_triton:
            return TorchAttention(*arguments, exact=exact)
        tried = (*LENGTHS, *(invariance.LENGTHS if exact else ()))
        return TritonAttention(
            *arguments,
            max_model_len=max(self.max_model_len, *tried),
            max_num_seqs=max(self.config.max_num_seqs, len(tried)),
            max_num_batched_tokens=max(self.config.max_num_batched_tokens, padded_rows(sum(tried))),
        )

    @property
    def _serves_triton(self) -> bool:
        name = self.config.attention_backend
        asked = name == "triton" or (name == "auto" and has_triton())
        return asked and self.device.type == "cuda"

    @property
    def _captures(self) -> bool:
        """Whether decode steps are CUDA graphs, if the model lets itself be captured."""
        eager = self.config.enforce_eager or self.config.tensor_parallel_size > 1
        return self.device.type == "cuda" and not eager and self._serves_triton

    def capture(self) -> None:
        """Capture the decode steps where they are CUDA graphs."""
        if self._captures:
            self.graphs = DecodeGraphs(self._model, self.backend, self.config.max_num_seqs, CudaGraphs(self.device))
            with torch.inference_mode():
                self.graphs.capture_all(self.parameters.live.graphs)

    def drop_cache(self) -> None:
        """Give back the KV cache and the graphs, in which its addresses and those of the parameters are baked in.

        Before the next forward pass `backend.allocate` and then `capture` make them anew.
        """
        self.graphs = None
        self.parameters.live.graphs = {}
        self.backend.free()

    @torch.inference_mode()
    def forward(
        self, token_ids: np.ndarray, batch: RaggedBatch, head_rows: np.ndarray, drawn: Tensor | None = None
    ) -> Tensor:
        """Compute the flat row `token_ids` (tokens,) int64 of `batch`; -1 - i stands for `drawn[i]`, on the device.

        Returns the logits (rows, vocab) of the tokens whose numbers are `head_rows` (rows,) int64, ascending.
        """
        logits = self._compute(token_ids, batch, head_rows, drawn)
        if self.routing is not None:
            self.routing.store(batch)
        return logits

    def _compute(
        self, token_ids: np.ndarray, batch: RaggedBatch, head_rows: np.ndarray, drawn: Tensor | None
    ) -> Tensor:
        flat = np.empty((2, len(token_ids)), np.int64)
        flat[0], flat[1] = token_ids, batch.positions
        inputs = self._to_device(flat)
        if drawn is not None:
            ids = inputs[0]
            late = drawn[(-1 - ids).clamp(min=0)].long().clamp(0, self.vocab_size - 1)  # no token may be there
            inputs[0] = torch.where(ids < 0, late, ids)
        if self.graphs is not None and not self.adapted and len(head_rows) == batch.num_tokens:
            logits = self.graphs.run(self.parameters.live.graphs, inputs[0], inputs[1], batch)
            if logits is not None:
                return logits
        self.backend.prepare(batch)
        head = self._to_device(head_rows)
        if self.config.batch_invariant and not self._serves_triton:
            inputs, head = fill_up(inputs, self.dtype), fill_up(head, self.dtype)
        return self._model(inputs[0:1], inputs[1:2], head)[: len(head_rows)]

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._can_pin:
            tensor = tensor.pin_memory()  # else the copy would wait for the step before
        return tensor.to(self.device, non_blocking=True)

    def _model(self, input_ids: Tensor, position_ids: Tensor, head_rows: Tensor) -> Tensor:
        with serving(self.backend):
            output = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=head_rows
            )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy cache blocks (source, destination), between two steps."""
        if pairs:
            self.backend.copy_blocks(pairs)
            if self.routing is not None:
                self.routing.copy_blocks(pairs)
