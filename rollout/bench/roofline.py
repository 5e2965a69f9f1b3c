"""`rollout bench roofline`: what the machine can do, and what that allows for a model."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.bench import report

READ_BYTES = 1 << 30
SQUARE = 2048
REPEATS = 7
ROWS = ((1, 1), (64, 64), (2048, 8))
"""Rows of a step, and of its head: one decode, the 8 x 8 load's decodes, and the prefill of its 8 prompts."""


@dataclass(frozen=True)
class Machine:
    """Bytes/s of reading memory, and operations/s of a square product (a multiplication and an addition are two)."""

    threads: int
    read_bytes_per_second: float
    flops: float


@dataclass(frozen=True)
class StepRoof:
    """The linear layers of one step of so many rows, `head_rows` of which reach the head, in seconds.

    `roof`: the larger of reading the weights once and doing the arithmetic. `measured`: as `F.linear` does them.
    """

    rows: int
    head_rows: int
    roof: float
    measured: float

    @property
    def tokens_per_second(self) -> float:
        """If a step were nothing but its roof."""
        return self.rows / self.roof


def best_seconds(function: Callable[[], object]) -> float:
    """The shortest of some runs, after one that warms up."""
    function()
    return min(timeit.repeat(function, number=1, repeat=REPEATS))


@torch.inference_mode()
def machine(dtype: torch.dtype) -> Machine:
    """Measure this machine's CPU with torch's current number of threads."""
    memory = torch.ones(READ_BYTES // 4)
    read = best_seconds(memory.sum)
    left, right = (torch.ones(SQUARE, SQUARE, dtype=dtype) for _ in range(2))
    product = best_seconds(lambda: F.linear(left, right))
    return Machine(torch.get_num_threads(), READ_BYTES / read, 2 * SQUARE**3 / product)


@torch.inference_mode()
def steps(machine: Machine, model: Path, dtype: torch.dtype, rows: Sequence[tuple[int, int]] = ROWS) -> list[StepRoof]:
    """The roof of a model's linear layers, and what they take with weights of their own each, as in the model."""
    body, head = linear_shapes(model)
    weights = [torch.ones(shape, dtype=dtype) for shape in (*body, head)]
    roofs = []
    for count, head_count in rows:
        rows_of = [count] * len(body) + [head_count]
        shapes = {(rows, weight.shape[1]) for rows, weight in zip(rows_of, weights, strict=True)}
        inputs = {shape: torch.ones(shape, dtype=dtype) for shape in shapes}

        def run(rows_of: list[int] = rows_of, inputs: dict[tuple[int, int], Tensor] = inputs) -> None:
            for rows, weight in zip(rows_of, weights, strict=True):
                F.linear(inputs[rows, weight.shape[1]], weight)

        reading = sum(weight.nbytes for weight in weights) / machine.read_bytes_per_second
        operations = 2 * sum(rows * weight.numel() for rows, weight in zip(rows_of, weights, strict=True))
        roofs.append(StepRoof(count, head_count, max(reading, operations / machine.flops), best_seconds(run)))
    return roofs


def linear_shapes(model: Path) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """(outputs, inputs) of every linear layer of a model's body, and of its head; no weight is loaded."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    head = skeleton.get_output_embeddings()
    layers = [module for module in skeleton.modules() if isinstance(module, nn.Linear) and module is not head]
    return [(m.out_features, m.in_features) for m in layers], (head.out_features, head.in_features)


def table(machine: Machine, roofs: list[StepRoof], dtype: torch.dtype) -> Table:
    """The machine in the title, a row for each size of a step."""
    title = (
        f"{machine.threads} threads: memory read {machine.read_bytes_per_second / 1e9:.1f} GB/s, "
        f"{str(dtype).removeprefix('torch.')} product {machine.flops / 1e9:.0f} GFLOP/s"
    )
    columns = ("rows of a step", "roof of the linear layers, ms", "F.linear, ms", "roof, tokens/s")
    rows = [
        (str(r.rows), f"{r.roof * 1e3:.2f}", f"{r.measured * 1e3:.2f}", f"{r.tokens_per_second:.0f}") for r in roofs
    ]
    return report.table(title, columns, rows)
