"""`rollout bench host`: what a decode step costs the host, on a device that computes nothing.

Everything of a CUDA step is there but the work of its tensors: the schedule, the plan's buffers, a graph whose replay
does nothing, the sampler on logits of VOCAB tokens, outputs as bytes. Run as a script it measures the `rollout` that is
found first, so that two source trees can be measured in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollout.bench import report
from rollout.bench.loads import Load
from rollout.bench.measure import Spread
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.process import _encode
from rollout.kernels.attention.base import AttentionBackend, RaggedBatch
from rollout.kernels.attention.cuda import StepBuffers
from rollout.messages import AddRequest, Outputs
from rollout.model.graphs import DecodeGraphs
from rollout.sampling import sampler
from rollout.sampling.params import SamplingParams

LOADS = (
    Load("64 x 1k", "64 sequences of 1,024 tokens", 8, 8, 1024, 1024, 1),
    Load("256 x 1k", "256 sequences of 1,024 tokens", 32, 8, 1024, 1024, 1),
    Load("256 x 4k", "256 sequences of 4,096 tokens", 32, 8, 4096, 4096, 1),
    Load("256 x 8k outputs", "256 sequences that have sampled 8,192 tokens", 32, 8, 16, 16, 8192),
)
"""Their `max_tokens` are those that each sequence has sampled before the first step that is measured."""
STEPS = 50
VOCAB = 8
BLOCK_SIZE = 16
MAX_MODEL_LEN = 40960
TIMEOUT_S = 1800.0


class _Plan(AttentionBackend):
    """Attention of which only the plan of a step is left, as `TritonAttention` keeps it."""

    def __init__(self, seqs: int) -> None:
        super().__init__([], 1, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        # The copy to a device goes on beside the host: here it goes nowhere.
        self.step = StepBuffers(2 * MAX_MODEL_LEN, seqs, MAX_MODEL_LEN // BLOCK_SIZE, torch.device("meta"))

    def prepare(self, batch: RaggedBatch) -> None:
        self.step.fill(batch, BLOCK_SIZE)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        pass

    def forward(self, *_: object) -> Tensor:
        raise NotImplementedError


class _Replay:
    def replay(self) -> None:
        """What a device would do meanwhile."""


class _Launch:
    """The sampler's kernel, which draws token 0."""

    @staticmethod
    def sample(logits: Tensor, asked: Tensor, *, processed: bool) -> Tensor:
        return torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64).expand(len(logits), 4)


def hollow_engine(load: Load) -> Engine:
    """An engine with room for the load, whose model computes nothing."""
    seqs = load.requests * load.n
    with tempfile.TemporaryDirectory() as folder:
        shape = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=MAX_MODEL_LEN,
        )
        LlamaForCausalLM(shape).save_pretrained(folder)
        blocks = seqs * (load.context // BLOCK_SIZE + 20)
        config = EngineConfig(
            folder,
            dtype="float32",
            device="cpu",
            attention_backend="torch",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=max(blocks, MAX_MODEL_LEN // BLOCK_SIZE),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=seqs,
            max_num_batched_tokens=MAX_MODEL_LEN,
            seed=0,
        )
        engine = Engine(config)
    runner, logits = engine.runner, torch.zeros(seqs, VOCAB)

    def forward(input_ids: Tensor, position_ids: Tensor, head_rows: Tensor) -> Tensor:
        return logits[: len(head_rows)]

    def capture(work: Callable[[], None]) -> _Replay:
        work()
        return _Replay()

    runner._model = forward  # type: ignore[method-assign]
    runner.backend = _Plan(seqs)
    runner.graphs = DecodeGraphs(forward, runner.backend, seqs, capture)
    runner.graphs.capture_all(runner.parameters.live.graphs)
    return engine


def hollow_sampler() -> None:
    """Let this process sample as CUDA does; in a source tree that has no kernel for it, by torch on one small block."""
    changes = {"BLOCK": VOCAB, "_drawn_by_triton": lambda logits: True, "_triton": lambda: _Launch}
    for name in changes.keys() & vars(sampler).keys():
        setattr(sampler, name, changes[name])


def step_seconds(engine: Engine, load: Load, steps: int = STEPS) -> list[float]:
    """CPU seconds of the engine's thread for each of `steps` steps in which all the load's sequences decode."""
    for number, prompt in enumerate(load.prompts(0, 0, VOCAB)):
        params = SamplingParams(n=load.n, max_tokens=load.max_tokens + steps + 64, ignore_eos=True)
        engine.add_request(AddRequest(request_id=f"bench-{number}", prompt_token_ids=prompt, sampling_params=params))
    running = engine.scheduler.running
    while len(running) < load.requests * load.n or not all(sequence.output_len for sequence in running):
        engine.step()
    for sequence in running:
        for token in range(load.max_tokens - sequence.output_len):
            sequence.append(token % VOCAB, 0)
    while any(sequence.num_to_compute > 1 for sequence in running):
        engine.step()
    seconds = []
    for number in range(-5, steps):
        began = time.thread_time()
        _encode(Outputs(engine.step()))
        if number >= 0:
            seconds.append(time.thread_time() - began)
    assert len(running) == load.requests * load.n
    return seconds


def measure(
    trees: Sequence[Path], rounds: int, on_round: Callable[[], None] = lambda: None, loads: Sequence[Load] = LOADS
) -> list[dict[str, list[float]]]:
    """For each source tree, by load, every step's seconds; the trees take turns, each time in a fresh process.

    Raises ValueError for a folder that holds no `rollout`, RuntimeError where a tree can't be measured.
    """
    for tree in trees:
        if not (tree / "rollout").is_dir():
            raise ValueError(f"{tree} holds no folder `rollout`: give the root of a source tree")
    found: list[dict[str, list[float]]] = [defaultdict(list) for _ in trees]
    asked = [{name: value for name, value in asdict(load).items() if value is not None} for load in loads]
    for number in range(rounds):
        order = list(zip(trees, found, strict=True))
        for tree, its in order if number % 2 == 0 else reversed(order):
            own = tree / "rollout/bench/host.py"  # what a tree measures by is made for its engine
            command = [sys.executable, "-P", str(own if own.exists() else __file__), json.dumps(asked)]
            ran = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=TIMEOUT_S
            )
            if ran.returncode:
                raise RuntimeError(f"{tree} can't be measured:\n{ran.stderr}")
            for name, seconds in json.loads(ran.stdout.splitlines()[-1]).items():
                its[name] += seconds
            on_round()
    return found


def table(trees: Sequence[Path], found: Sequence[dict[str, list[float]]]) -> Table:
    """Milliseconds of a step for each load and tree."""
    rows = [(name, *(report.spread(Spread.of(its[name]), 1e3, 2) for its in found)) for name in found[0]]
    return report.table("ms of a decode step, median (min–max)", ("sequences", *map(str, trees)), rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    hollow_sampler()
    asked = [Load(**fields) for fields in json.loads(sys.argv[1])]
    print(json.dumps({load.name: step_seconds(hollow_engine(load), load) for load in asked}))
