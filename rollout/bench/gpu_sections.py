"""What `rollout bench gpu` tries: sections that say what they looked at and what they found."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.kernels.attention.base import AttentionParams, LayerShape, RaggedBatch
from rollout.launch import Launched, launch, serve_command
from rollout.messages import AddRequest
from rollout.model.graphs import CudaGraphs, DecodeGraphs, Graph
from rollout.sampling.params import SamplingParams
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.control import WeightPushError
from trainer_bridge.push.sender import WeightSender

START_S = 300.0
TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 0.15}
"""Largest difference of a logprob from transformers' that is no fault: roundings in float32, and in 16 bits."""
SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "moe_intermediate_size": 48,
    "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip
Found = Iterator[tuple[str, str]]
"""(what was looked at, what was found); an exception is what went wrong."""


@dataclass(frozen=True)
class Place:
    """Where sections run: a device, an empty folder, and a server that is started when it is first asked for."""

    dry: bool
    folder: Path
    stack: contextlib.ExitStack

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def model(self, kind: str, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A small model with random weights, wide enough that logits are far apart."""
        generator = torch.Generator().manual_seed(seed)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SMALL), dtype=torch.float32)
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1.5 * parameter.shape[-1] ** -0.5
            parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else noise * scale
        made.eval().requires_grad_(False).to(self.device, dtype)
        return made

    def saved(self, model: PreTrainedModel) -> Path:
        path = self.folder / f"{model.config.model_type}-{model.dtype}".replace("torch.", "")
        model.save_pretrained(path)
        return path

    @cached_property
    def server(self) -> tuple[RolloutClient, Launched]:
        """`rollout serve` of a small model, and a client of it."""
        flags = ["--tokens-only", "--enable-sleep-mode", "--device", self.device.type, "--dtype", "float32"]
        flags += ["--num-gpu-blocks-override", "256", "--block-size", "16", "--max-model-len", "256"]
        command = serve_command(self.saved(self.model("qwen3", 0)), *flags)
        server = self.stack.enter_context(launch(command, timeout_s=START_S))
        return self.stack.enter_context(RolloutClient(server.url, timeout_s=60)), server

    def push(self, backend: str, seed: int) -> str:
        """Push other weights to the server; how long it took, and how far its answer is from theirs."""
        client, model, began = self.server[0], self.model("qwen3", seed), time.perf_counter()
        folder = self.folder / "pushes" if backend == "disk" else None
        options: dict[str, Any] = {"backend": backend, "disk_path": folder, "timeout_s": 30}
        with WeightSender.connect(client, model, **options) as sender:
            sender.push(f"{backend}-{seed}")
        seconds, prompt = time.perf_counter() - began, prompts(3)[2]
        choice = client.generate(prompt, {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}).choices[0]
        worst = gap(model, prompt, choice.token_ids, choice.logprobs or [])
        assert worst < TOLERANCE[model.dtype], f"logprobs differ from the pushed model's by {worst:.3g}"
        return f"{seconds:.2f} s with connecting; max |Δ logprob| {worst:.2g}"

    def engine(self, path: Path, **config: Any) -> Engine:
        """An engine with room for a few hundred tokens, unless `config` says otherwise."""
        small = {"num_gpu_blocks_override": 256, "block_size": 16, "max_model_len": 256, "max_num_seqs": 8, "seed": 0}
        return Engine(EngineConfig(model=str(path), device=self.device.type, **{**small, **config}))  # type: ignore[arg-type]


def serve(engine: Engine, prompts: Sequence[list[int]], tokens: int = 12) -> list[tuple[list[int], list[float]]]:
    """Each prompt's sampled ids and their logprobs, all prompts in company."""
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, seed=number)
        engine.add_request(AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
    outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            if output.token_id is not None and output.logprobs:
                ids, logprobs = outputs[int(output.request_id)]
                ids.append(output.token_id)
                logprobs.append(output.logprobs[0].logprob)
    return outputs


def prompts(count: int) -> list[list[int]]:
    """Different small prompts, of up to 40 tokens."""
    lengths = [1 + 39 * number // max(1, count - 1) for number in range(count)]
    return [[(7 * number + 3 * i) % 500 + 2 for i in range(length)] for number, length in enumerate(lengths)]


@torch.inference_mode()
def gap(model: PreTrainedModel, prompt: list[int], ids: list[int], logprobs: list[float]) -> float:
    """The largest difference of these logprobs from the model's own; NaN and a missing one are infinitely large."""
    if not ids or len(ids) != len(logprobs):
        return math.inf
    row = torch.tensor([prompt + ids], device=model.device)
    table = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    wanted = table.gather(-1, row[0, len(prompt) :, None])[:, 0].cpu()
    return float((wanted - torch.tensor(logprobs)).abs().max().nan_to_num(math.inf))


def agree(model: PreTrainedModel, engine: Engine, count: int = 5) -> str:
    """Serve some prompts; how far they are from transformers. Raises AssertionError where that is too far."""
    asked = prompts(count)
    worst = max(gap(model, prompt, *answer) for prompt, answer in zip(asked, serve(engine, asked), strict=True))
    assert worst < TOLERANCE[model.dtype], f"logprobs differ from transformers' by {worst:.3g}"
    return f"max |Δ logprob| {worst:.2g}"


def versions(at: Place) -> Found:
    """What is installed, and the device."""
    for name in ("torch", "transformers", "triton", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)
    yield "CUDA", str(torch.version.cuda)
    if not at.dry:
        device = torch.cuda.get_device_properties(at.device)
        yield "device", f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / (1 << 30):.1f} GiB"


def kernels(at: Place) -> Found:
    """Paged attention against dense attention, experts against the loop over them."""
    from rollout.kernels.attention.cuda import TritonAttention

    dtype = torch.float16 if at.dry else torch.bfloat16  # Triton's interpreter multiplies no bfloat16
    cases = [(64, 2, 4, 33, None), (80, 1, 3, None, 2.0), (128, 2, 8, None, None), (256, 1, 2, 100, None)]
    for dim, kv_heads, group, window, softcap in cases[: 1 if at.dry else None]:
        limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024}
        backend = TritonAttention([LayerShape(kv_heads, dim, dim)], 80, 16, dtype, at.device, **limits)
        params = AttentionParams(dim**-0.5, window, softcap)
        worst = 0.0
        for context, tokens in [(70, 1)] if at.dry else [(900, 1), (700, 9)]:
            q, k, v = (
                torch.randn(heads, context, dim, device=at.device).to(dtype)
                for heads in (kv_heads * group, kv_heads, kv_heads)
            )
            blocks = list(range(1, 1 + -(-context // 16)))
            wanted = _dense(q, k, v, params)
            for part in (context, tokens):  # as a prompt, and then its last tokens again
                backend.prepare(RaggedBatch([0, part], [context], [blocks]))
                got = backend.forward(0, q[:, -part:], k[:, -part:], v[:, -part:], params).float()
                worst = max(worst, (got - wanted[-part:]).abs().max().item())
        assert worst < 0.02, f"head size {dim}: off by {worst:.3g}"
        yield f"attention, head size {dim}, {group} to a key", f"max |Δ| {worst:.2g}"
    experts = importlib.import_module("rollout.kernels.triton_experts")
    module = at.model("qwen3_moe", 0).get_decoder().layers[0].mlp.experts
    for tokens in (3, 20 if at.dry else 500):
        x = torch.randn(tokens, SMALL["hidden_size"], device=at.device)
        weights, chosen = torch.rand(tokens, SMALL["num_experts"], device=at.device).topk(2)
        module.config._experts_implementation = "eager"
        error = (experts.experts_forward(module, x, chosen, weights) - module(x, chosen, weights)).abs().max().item()
        assert error < 1e-3, f"off by {error:.3g}"
        yield f"experts, {tokens} tokens", f"max |Δ| {error:.2g}"


def _dense(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """Causal attention (tokens, heads, dim) in float32, of as many queries as keys."""
    group, length = len(q) // len(k), q.shape[1]
    k, v = (t.float().repeat_interleave(group, 0) for t in (k, v))
    scores = q.float() @ k.transpose(1, 2) * params.scaling
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = (distance < 0) | (distance >= (params.window or length))
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1)


def engine(at: Place) -> Found:
    """A dense model and a mixture of experts against transformers."""
    for kind in ("qwen3", "qwen3_moe"):
        for dtype in (torch.float32,) if at.dry else (torch.float32, torch.bfloat16):
            model = at.model(kind, 0, dtype)
            served = at.engine(at.saved(model), dtype=str(dtype).removeprefix("torch."))
            runner, found = served.runner, agree(model, served)
            replays = runner.graphs.replays if runner.graphs else 0
            yield f"{kind}, {dtype}", f"{found}; {type(runner.backend).__name__}, {replays} replays"
            served.close()


def commits(at: Place) -> Found:
    """Other weights again and again, each waiting for a reader: what serves, also by graphs, is the latest."""
    served = at.engine(at.saved(at.model("qwen3", 0)), dtype="float32")
    store, gaps = served.store, []
    for step in range(1, 3 if at.dry else 13):
        model = at.model("qwen3", step)
        staging = store.stage()
        for name, value in model.named_parameters():
            staging.into.tensors[name].copy_(value)
        served.runner.packed.pack(staging.into)
        with store.snapshot():  # as a checksum does, it holds what serves while the next set is ready
            waits = not store.can_commit(staging)
        assert waits == (store.parameters.method == "copy"), "a commit would overwrite what is read"
        store.commit(staging, None)
        served.scheduler.commit(store.epoch, "recompute")
        gaps.append(agree(model, served, 3))
    yield f"{len(gaps)} commits, each beside a reader", gaps[-1]
    replays = served.runner.graphs.replays if served.runner.graphs else 0
    yield "CUDA graphs", f"{len(store.parameters.live.graphs)}, {replays} replays"


def capture(at: Place) -> Found:
    """A forward pass that can't be captured: decoding goes on without graphs, and on its stream."""
    model = at.model("qwen3", 0)
    served = at.engine(at.saved(model), dtype="float32", enforce_eager=True)
    runner = served.runner

    def refuse(work: Callable[[], None]) -> Graph:
        raise RuntimeError("operation not permitted when stream is capturing")

    def wait(*_: object) -> None:
        if not at.dry and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    runner.model.get_decoder().layers[0].register_forward_pre_hook(wait)
    graphs: dict[int, Graph] = {}
    runner.graphs = DecodeGraphs(runner._model, runner.backend, 8, refuse if at.dry else CudaGraphs(at.device))
    with torch.inference_mode():
        runner.graphs.capture_all(graphs)
    assert not graphs, "a forward pass that waits was captured"
    assert at.dry or torch.cuda.current_stream() == torch.cuda.default_stream(), "it stayed on the capture's stream"
    yield "a forward pass that waits", agree(model, served)


def pushes(at: Place) -> Found:
    """By every backend; on one device NCCL has to be refused, and the server to live on."""
    for seed, backend in enumerate(("gloo", "disk") if at.dry else ("ipc", "gloo", "disk", "nccl", "ipc"), 1):
        try:
            yield backend, at.push(backend, seed)
        except WeightPushError as error:
            if backend != "nccl":
                raise
            yield backend, f"refused: {error}"


def sleep(at: Place) -> Found:
    """What is given back at both levels; after the first the server says the same as before, after the second a push
    restores it."""
    client, server = at.server
    at.push("gloo", 5)

    def answer() -> tuple[list[int], Tensor]:
        choice = client.generate(prompts(3)[1], {"max_tokens": 8, "temperature": 0, "logprobs": 0}).choices[0]
        return choice.token_ids, torch.tensor(choice.logprobs)

    for level in (1, 2):
        before, said = _held(at, server.pid), answer()
        client.sleep(level)
        given = (before - _held(at, server.pid)) / (1 << 20)
        assert client.is_sleeping()
        client.wake_up()
        if level == 2:
            at.push("gloo", 5)
        ids, logprobs = answer()  # on a CPU chunks of a prompt follow the clock, and a BLAS's bits the chunks
        assert ids == said[0], "another answer than before it slept"
        assert torch.allclose(logprobs, said[1], atol=1e-4), "other logprobs than before it slept"
        yield f"level {level}", f"{given:.0f} MiB given back; awake, the same answer"


def _held(at: Place, pid: int) -> int:
    """Bytes of the device, or on a CPU of the server's processes."""
    if not at.dry:
        free, total = torch.cuda.mem_get_info()
        return total - free
    server = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))


def exact(at: Place) -> Found:
    """Whether batch-invariant mode is accepted, and then a request's bits alone and in company."""
    for dtype in ("float32",) if at.dry else ("float32", "bfloat16"):
        model = at.model("qwen3", 0, getattr(torch, dtype))
        try:
            served = at.engine(at.saved(model), dtype=dtype, batch_invariant=True)
        except ValueError as error:
            yield f"--batch-invariant in {dtype}", f"refused: {error}"
            continue
        asked = prompts(4)
        together, alone = serve(served, asked), [serve(served, [prompt])[0] for prompt in asked[:1]]
        assert alone[0] == together[0], "a request's bits depend on its company"
        yield f"--batch-invariant in {dtype}", f"equal bits alone and in company; {agree(model, served)}"
