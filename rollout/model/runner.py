"""The model on its device: the ragged batch of a step goes in, the logits of the rows that matter come out."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rollout.config import EngineConfig
from rollout.kernels.attention import native_paged as native
from rollout.kernels.attention.base import AttentionBackend, LayerShape, RaggedBatch, serving
from rollout.kernels.attention.chunked import CHUNK, fill_up, padded_rows
from rollout.kernels.attention.torch_paged import TorchAttention
from rollout.kernels.native import keep_freed_memory
from rollout.model.fused import PackedWeights, fuse_gates, fuse_norms, fuse_rotary
from rollout.model.graphs import CudaGraphs, DecodeGraphs
from rollout.model.invariance import prove_batch_invariance
from rollout.model.loader import eos_token_ids, load_model, plug_in_attention
from rollout.model.parameters import ModelParameters
from rollout.model.routed_experts import RoutedExperts

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
        self.model = load_model(config)
        self.eos_token_ids = eos_token_ids(config, self.model)
        loaded = time.perf_counter()
        shapes = plug_in_attention(self.model)
        self.device, self.dtype = self.model.device, self.model.dtype
        fuse_norms(self.model)
        fuse_rotary(self.model)
        self.parameters = ModelParameters(self.model)
        self.packed = PackedWeights(self.parameters)
        fuse_gates(self.model)
        if config.batch_invariant:
            prove_batch_invariance(self.model, lambda blocks: self._backend(shapes, blocks), config.block_size)
        text_config = self.model.config.get_text_config()
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        limit = getattr(text_config, "max_position_embeddings", None)
        self.max_model_len: int = config.max_model_len or limit or 2048
        if limit and self.max_model_len > limit:
            raise ValueError(f"max_model_len ({self.max_model_len}) exceeds the model's own limit of {limit} positions")
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
        self.routing: RoutedExperts | None = None
        self.graphs: DecodeGraphs | None = None
        if config.enable_return_routed_experts:
            one = RaggedBatch([0, 1], [1], [[0]])  # a token in the null block
            self.routing = RoutedExperts(
                self.model,
                self.num_blocks,
                config.block_size,
                padded_rows(config.max_num_batched_tokens),
                probe=lambda: self.forward([0], one, [0]),
            )
        self.graphs = self._decode_graphs()
        self.seconds = {"load": loaded - started, "check_and_cache": time.perf_counter() - loaded}

    @property
    def max_head_rows(self) -> int:
        return max(1, LOGIT_BYTES // (4 * self.vocab_size))

    def _num_blocks(self, shapes: list[LayerShape]) -> int:
        """How many blocks of cache: block 0, which is padding, and all that memory and need allow."""
        config = self.config
        if config.num_gpu_blocks_override:
            return config.num_gpu_blocks_override + 1
        block_bytes = config.block_size * sum(shape.bytes_per_token(self.dtype) for shape in shapes)
        per_sequence = -(-self.max_model_len // config.block_size)
        if config.kv_cache_memory_bytes:
            budget = config.kv_cache_memory_bytes
        elif self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            wholes = list(self.model.parameters())
            held = [getattr(whole, "_local_tensor", whole) for whole in wholes]  # this rank's share of it
            staging = sum(p.numel() * p.element_size() for p in held)
            if config.tensor_parallel_size > 1:  # a whole parameter arrives before it is cut
                free -= max(p.numel() * p.element_size() for p in wholes)
            reserve = staging * (config.weight_staging == "full") + total * (1 - config.gpu_memory_utilization)
            budget = int(free - reserve - (1 << 30))
        else:
            budget = CPU_CACHE_BYTES
        return 1 + min(budget // block_bytes, per_sequence * config.max_num_seqs)

    def _backend(self, shapes: list[LayerShape], num_blocks: int) -> AttentionBackend:
        arguments = (shapes, num_blocks, self.config.block_size, self.dtype, self.device)
        name, exact = self.config.attention_backend, self.config.batch_invariant
        if name == "native" or (name == "auto" and native.serves(*arguments)):
            return native.NativeAttention(*arguments)
        if exact and name == "auto" and native.serves(shapes, num_blocks, native.LANES, self.dtype, self.device):
            raise ValueError(
                f"batch_invariant needs a block_size that is a multiple of {native.LANES} and divides {CHUNK}, "
                f"got {self.config.block_size}: a trainer's attention is in such blocks"
            )
        if name == "torch" or exact or self.device.type == "cpu":
            return TorchAttention(*arguments, exact=exact)
        from rollout.kernels.attention import cuda

        return cuda.choose(
            name,
            *arguments,
            max_model_len=self.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )

    def _decode_graphs(self) -> DecodeGraphs | None:
        eager = self.config.enforce_eager or self.config.tensor_parallel_size > 1
        if self.device.type != "cuda" or eager or isinstance(self.backend, TorchAttention):
            return None
        return DecodeGraphs(self._model, self.backend, self.config.max_num_seqs, CudaGraphs(self.device))

    @torch.inference_mode()
    def forward(self, token_ids: list[int], batch: RaggedBatch, head_rows: list[int]) -> Tensor:
        """Compute the flat row `token_ids` of `batch`; their logits (len(head_rows), vocab)."""
        logits = self._compute(token_ids, batch, head_rows)
        if self.routing is not None:
            self.routing.store(batch)
        return logits

    def _compute(self, token_ids: list[int], batch: RaggedBatch, head_rows: list[int]) -> Tensor:
        positions, rows = batch.positions(), len(head_rows)
        if self.graphs is not None and head_rows == list(range(batch.num_tokens)):
            graphs = self.parameters.live.graphs
            logits = self.graphs.run(graphs, torch.tensor(token_ids), torch.tensor(positions), batch)
            if logits is not None:
                return logits
        self.backend.prepare(batch)
        if self.config.batch_invariant:
            token_ids, positions, head_rows = (fill_up(row, self.dtype) for row in (token_ids, positions, head_rows))
        inputs = torch.tensor([token_ids, positions], device=self.device)
        head = torch.tensor(head_rows, dtype=torch.long, device=self.device)
        return self._model(inputs[0:1], inputs[1:2], head)[:rows]

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
