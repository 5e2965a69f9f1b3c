"""The native kernels of arm64 beside those of this processor: cross-compiled, run by an emulator, compared bit by bit.

    python -m tests.peers.arm64

Needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu, qemu-user-static), and an x86-64
processor with AVX2. One program calls every kernel on the same random inputs. It is compiled for this processor, for
arm64 with NEON alone, and with the instructions that multiply bfloat16. What each leaves in memory must be the same,
since the kernels fix the order of every sum. Only where chunks' softmaxes are merged is the system's `exp` called, so
attention is compared within roundings. Products are compared with exact ones in float64, too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.kernels.native import FLAGS, SIGNATURES, SOURCES

ARM64 = {"NEON": "armv8-a", "NEON with products of bfloat16": "armv8.6-a+bf16"}
C_TYPES = {"l": "int64_t", "i": "int", "f": "float"}
TIMEOUT_S = 600


@dataclass
class Memory:
    """What the program reads, works on and writes back: tensors one behind the other, and the calls that use them."""

    tensors: list[Tensor] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0
    calls: list[str] = field(default_factory=list)

    def place(self, tensor: Tensor) -> int:
        """Where the tensor will lie."""
        self.tensors.append(tensor.contiguous())
        self.offsets.append(self.size)
        self.size += (tensor.nbytes + 63) // 64 * 64
        return self.offsets[-1]

    def call(self, kernel: str, *arguments: Any) -> None:
        """Call a kernel by its signature. A pointer is given as a tensor, or as where one was placed; None is null."""
        letters = SIGNATURES[kernel].replace(" ", "")
        assert len(letters) == len(arguments), (kernel, len(letters), len(arguments))
        written = []
        for number, (letter, argument) in enumerate(zip(letters, arguments, strict=True)):
            if letter != "p":
                written.append(f"({C_TYPES[letter]}){argument!r}")
            elif argument is None:
                written.append("nullptr")
            else:
                offset = self.place(argument) if isinstance(argument, Tensor) else argument
                written.append(f"pointer(argument<{number}>(&{kernel}), {offset})")
        self.calls.append(f"    {kernel}({', '.join(written)});")

    def program(self) -> str:
        """The C++ source: the kernels themselves, and a main that calls them."""
        return f"""
#include "{SOURCES[0]}"
#include <cstdio>
static char* memory;
template <int N, class R, class... A>
std::tuple_element_t<N, std::tuple<A...>>* argument(R (*)(A...)) {{ return nullptr; }}
template <class P> P pointer(P*, long at) {{ return (P)(memory + at); }}
int main(int, char** paths) {{
    memory = (char*)aligned_alloc(64, {self.size});
    FILE* file = fopen(paths[1], "rb");
    if (!file || fread(memory, 1, {self.size}, file) != {self.size}) return 1;
    fclose(file);
{chr(10).join(self.calls)}
    file = fopen(paths[2], "wb");
    return !file || fwrite(memory, 1, {self.size}, file) != {self.size} || fclose(file);
}}
"""

    def content(self) -> bytes:
        content = bytearray(self.size)
        for offset, tensor in zip(self.offsets, self.tensors, strict=True):
            content[offset : offset + tensor.nbytes] = tensor.view(torch.uint8).numpy().tobytes()
        return bytes(content)

    def read(self, content: bytes, offset: int) -> Tensor:
        """The tensor that was placed there, as the program left it."""
        placed = self.tensors[self.offsets.index(offset)]
        return torch.frombuffer(bytearray(content[offset : offset + placed.nbytes]), dtype=placed.dtype).view(
            placed.shape
        )


def products(memory: Memory) -> dict[int, tuple[Tensor, Tensor]]:
    """Products of every count of rows that has a loop of its own; by where each lies, its exact result and bound."""
    expected = {}
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        for rows, n, k in ((1, 200, 192), (2, 64, 128), (3, 65, 64), (5, 130, 96), (6, 64, 64), (13, 100, 320)):
            x, weight, bias = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n)
            packed = memory.place(torch.zeros((n + 63) // 64 * 64, k, dtype=dtype))
            memory.call(f"pack_{suffix}", weight, n, k, packed)
            result = memory.place(torch.zeros(rows, n))
            memory.call(f"multiply_{suffix}", x, packed, bias, rows, n, k, result, 0)
            bound = (x.double().abs() @ weight.double().abs().T + bias.double().abs()) * (k + 2) * 2.0**-23
            expected[result] = (x.double() @ weight.double().T + bias, bound)
    return expected


def small_kernels(memory: Memory) -> None:
    """Norms, rotations, gates and draws."""
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        for dim in (64, 100, 576):
            x, weight = (3 * torch.randn(4, dim)).to(dtype), torch.rand(dim).to(dtype)
            memory.call(f"normalize_{suffix}", x, weight, 1e-5, torch.zeros(4, dim, dtype=dtype), 4, dim, 8)
        tokens, heads, dim = 3, 2, 48
        x, angle = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, dim)
        turned = torch.zeros(tokens, heads, dim, dtype=dtype)
        tables = angle.cos().to(dtype), angle.sin().to(dtype)
        memory.call(f"rotate_{suffix}", x, dim, heads * dim, *tables, turned, heads, tokens, dim)
    gates, ups = (5 * torch.randn(3, 80)).bfloat16(), torch.randn(3, 80).bfloat16()
    memory.call("gate_bf16", gates, ups, 80, torch.zeros(3, 80, dtype=torch.bfloat16), 3, 80)
    logits, heat = 4 * torch.randn(5, 1000), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1])
    logits[3, 7], logits[4, 9] = float("nan"), float("inf")
    memory.call("draw_f32", logits, 1000, 1000, heat, torch.rand(5).double(), torch.zeros(5, dtype=torch.int64), 5)


def attention(memory: Memory) -> list[int]:
    """Two prompts and one decode over a paged cache, with a window, a softcap and sinks; where the outputs lie."""
    outputs = []
    heads, kv_heads, dim, block_size, blocks = 6, 2, 64, 16, 24
    spans = [(0, 40), (40, 150)]  # tokens of each sequence
    tokens = spans[-1][1]
    tables = torch.arange(blocks, dtype=torch.int32).flip(0).view(2, 12)
    slots = torch.cat([tables[s, torch.arange(b - a) // block_size] * block_size + torch.arange(b - a) % block_size
                       for s, (a, b) in enumerate(spans)]).int()  # fmt: skip
    rows = torch.arange(tokens, dtype=torch.int32)
    seen = torch.cat([torch.arange(1, b - a + 1) for a, b in spans]).int()
    table_at = torch.cat([torch.full((b - a,), 12 * s) for s, (a, b) in enumerate(spans)]).long()
    tiles = torch.tensor([*range(0, tokens, 8), tokens], dtype=torch.int32)
    for dtype, suffix in ((torch.bfloat16, "bf16"), (torch.float32, "f32")):
        for window, softcap, sinks in ((0, 0.0, None), (33, 20.0, torch.randn(heads))):
            query = torch.randn(heads, tokens, dim).to(dtype)
            key, value = (torch.randn(kv_heads, tokens, dim).to(dtype) for _ in range(2))
            strides = torch.tensor([tokens * dim, dim] * 3)
            cache = [torch.zeros(blocks, kv_heads, block_size, dim, dtype=dtype) for _ in range(2)]
            outputs.append(memory.place(torch.zeros(tokens, heads, dim, dtype=dtype)))
            memory.call(
                f"attend_{suffix}", query, key, value, strides, *cache, kv_heads, block_size, dim, dim, heads, slots,
                tokens, torch.arange(blocks, dtype=torch.int32), blocks, rows, seen, table_at, tables, tiles,
                len(tiles) - 1, dim**-0.5, window, softcap, sinks, outputs[-1], torch.zeros(heads, tokens), tokens,
            )  # fmt: skip
    return outputs


def run(memory: Memory, folder: Path, compiler: list[str], emulator: list[str]) -> bytes:
    """What the program leaves in memory."""
    source, program, before, after = (folder / name for name in ("main.cpp", "main", "before", "after"))
    source.write_text(memory.program())
    before.write_bytes(memory.content())
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [*compiler, *flags, "-fopenmp", "-static", "-include", "tuple", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)  # warns of static linking
    subprocess.run([*emulator, str(program), str(before), str(after)], check=True, timeout=TIMEOUT_S)
    return after.read_bytes()


def main() -> int:
    """Compare, say what differs, and return the exit status."""
    missing = [name for name in ("aarch64-linux-gnu-g++", "qemu-aarch64-static") if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}; on Debian: apt install g++-aarch64-linux-gnu qemu-user-static")
        return 2
    torch.manual_seed(0)
    memory = Memory()
    exact = products(memory)
    small_kernels(memory)
    merged = attention(memory)
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = run(memory, folder, ["g++", "-march=native", "-mno-avx512f"], [])
        for label, architecture in ARM64.items():
            compiler = ["aarch64-linux-gnu-g++", f"-march={architecture}"]
            there = run(memory, folder, compiler, ["qemu-aarch64-static", "-cpu", "max"])
            wrong = sum(
                int(((memory.read(there, offset).double() - result).abs() > bound).sum())
                for offset, (result, bound) in exact.items()
            )
            largest, differing = 0.0, 0
            for offset in memory.offsets:
                ours, theirs = (memory.read(content, offset) for content in (here, there))
                if offset in merged:
                    gap = (ours.double() - theirs.double()).abs()
                    largest = max(largest, float((gap / (1 + ours.double().abs())).max()))
                else:
                    same = ours.view(torch.uint8) == theirs.view(torch.uint8)
                    differing += int((~same).sum())
            failures += wrong + differing + (largest > 2.0**-7)
            changed = np.count_nonzero(np.frombuffer(there, np.uint8) != np.frombuffer(memory.content(), np.uint8))
            print(
                f"{label}: {len(memory.calls)} calls, {changed} bytes written, {differing} differ from this "
                f"processor's; attention within {largest:.1e}; {wrong} products beyond their bounds"
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
