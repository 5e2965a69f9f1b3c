"""What a real engine process takes at its peak, by the kernel's own count, while it does what takes most."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rollout.kernels.products import multiplies
from rollout.launch import serve
from tests.support.engine_utils import prompt
from trainer_bridge.client import RolloutClient
from trainer_bridge.push.sender import WeightSender
from trainer_bridge.push.transaction import PACKED_BUFFER_BYTES

MIB = 1 << 20
CACHE = 64 * MIB
ALLOWANCE = 1024 * MIB  # the interpreter, its libraries, and all temporary tensors
NOISE = 48 * MIB  # of the allocator, where the same work is done again
CONFIG = LlamaConfig(  # SmolLM2-135M's shapes, with few layers and an untied head
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class EngineProcess:
    """The engine process of a server, as /proc has it; sizes in bytes of resident memory."""

    client: RolloutClient
    pid: int

    @property
    def now(self) -> int:
        return self._status("VmRSS")

    @property
    def peak(self) -> int:
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, name: str) -> int:
        (line,) = [ln for ln in Path(f"/proc/{self.pid}/status").read_text().splitlines() if ln.startswith(name + ":")]
        number, unit = line.split()[1:]
        assert unit == "kB"
        return int(number) * 1024


def children(pid: int, argument: str) -> list[int]:
    """The processes that `pid` has started with this argument on their command line."""
    pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in pids if argument.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    return {name: torch.full(p.shape, 0.01) for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("memory")
    CONFIG.save_pretrained(folder)
    flags = f"--load-format dummy --dtype float32 --device cpu --kv-cache-memory-bytes {CACHE} --tokens-only"
    flags += " --return-sampling-mask --num-threads 1"
    with serve(folder, folder / "log", *flags.split()) as url, RolloutClient(url) as client:
        (server,) = children(os.getpid(), str(folder))
        (pid,) = children(server, "--multiprocessing-fork")
        yield EngineProcess(client, pid)


def heavy_work(client: RolloutClient) -> None:
    """Prompt logprobs of more rows than fit into one step, beside 64 rows that sample from most of the vocabulary."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.generate, prompt(800), {"max_tokens": 2, "prompt_logprobs": 5})
        group = client.generate(prompt(40), {"max_tokens": 1, "top_p": 0.9, "logprobs": 5}, n=64)
        assert len(asked.result().raw["prompt_logprobs"]) == 800
    for choice in group.choices:
        assert choice.sampling_mask is not None
        assert all(mask is not None and len(mask) > 20_000 for mask in choice.sampling_mask)


def test_the_engine_takes_weights_staging_cache_and_at_most_a_gibibyte(
    engine: EngineProcess, tensors: dict[str, torch.Tensor]
) -> None:
    weights = sum(tensor.nbytes for tensor in tensors.values())
    layers = {name: tensor.nbytes for name, tensor in tensors.items() if tensor.dim() == 2 and "embed" not in name}
    packed, scratch = 0, 0
    if multiplies(torch.float32):  # products are ours: a second copy, each layer of which is made beside the one before
        packed, scratch = sum(layers.values()), max(layers.values())
    assert weights > 250 * MIB
    heavy_work(engine.client)
    assert engine.peak <= weights + packed + CACHE + ALLOWANCE

    grew = []
    for in_buffers in (False, False, True):
        before = engine.now
        engine.forget_peak()
        with WeightSender.connect(engine.client, tensors, packed=in_buffers, timeout_s=60) as sender:
            sender.push()
        grew.append(engine.peak - before)
    assert weights + packed - NOISE < grew[0] < weights + packed + NOISE  # staging, into which all of it was received
    assert grew[1] < NOISE + scratch
    assert grew[2] < PACKED_BUFFER_BYTES + max(tensor.nbytes for tensor in tensors.values()) + NOISE + scratch
    heavy_work(engine.client)
    assert engine.peak <= 2 * (weights + packed) + CACHE + ALLOWANCE
