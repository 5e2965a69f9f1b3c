"""The native kernels against float64 and against what they replace; packed weights across updates."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rollout.engine.engine import Engine
from rollout.kernels import native, products
from rollout.kernels.products import PackedWeight, serves_linear
from rollout.model import fused
from rollout.model.fused import PackedWeights, SiLUGate, fuse_gates, fuse_norms, fuse_rotary, native_gate
from rollout.model.parameters import CommitMethod, ModelParameters
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.exact_rollouts import exact_engine, request, roll_out, same_bits
from tests.support.weight_updates import fill, saved_tensors

REQUESTS = [request("group", prompt(40), n=3), request("one", prompt(3)), request("greedy", prompt(20), temperature=0)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40) | st.sampled_from([64, 700]),
    inputs=st.integers(1, 40).map(lambda k: 2 * k) | st.just(1536),
    widths=st.lists(st.sampled_from([1, 15, 16, 63, 64, 65, 200]), min_size=1, max_size=3),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_products_are_exact_sums_rounded_once(
    rows: int, inputs: int, widths: list[int], bias: bool, threads: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    inputs -= dtype is torch.float32  # an odd number of them, too
    weights = [torch.randn(n, inputs, generator=generator).to(dtype) for n in widths]
    biases = [torch.randn(n, generator=generator).to(dtype) for n in widths] if bias else []
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    packed = PackedWeight.of(weights, biases)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sums, rounded = packed.multiply(x, torch.float32), packed.multiply(x)
    finally:
        torch.set_num_threads(before)
    expected = x.double() @ torch.cat(weights).double().T + (torch.cat(biases).double() if bias else 0)
    scale = x.double().abs() @ torch.cat(weights).double().abs().T + 1
    assert bool(((sums - expected).abs() <= scale * (inputs + 2) * 2.0**-23).all())
    assert torch.equal(rounded, sums.to(dtype))
    for row in range(min(rows, 7)):  # a row alone, and other layers' outputs beside it or not
        assert torch.equal(packed.multiply(x[row : row + 1], torch.float32)[0], sums[row])
    alone = PackedWeight.of(weights[-1:], biases[-1:]).multiply(x, torch.float32)
    assert torch.equal(alone, sums[:, -widths[-1] :])


def test_a_product_of_other_dtypes_is_refused() -> None:
    """It would be written beyond the memory of its result."""
    packed = PackedWeight.of([torch.ones(4, 4)])
    with pytest.raises(ValueError, match=r"torch.float32 times a weight in torch.float32 can't give torch.bfloat16"):
        packed.multiply(torch.ones(1, 4), torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch.bfloat16 times a weight in torch.float32"):
        packed.multiply(torch.ones(1, 4).bfloat16())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_rotary_embeddings_keep_every_bit(name: str, dtype: torch.dtype) -> None:
    model, stock = (tiny_models.model(name).to(dtype) for _ in range(2))
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    fuse_norms(model)
    fuse_rotary(model)
    taken = [module for module in norms if "forward" in vars(module)]
    assert taken == [module for module in norms if hasattr(module, "variance_epsilon")]
    ids = torch.tensor([prompt(33)])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral"])
def test_gates_keep_every_bit(name: str) -> None:
    model, stock = (tiny_models.model(name).bfloat16() for _ in range(2))
    PackedWeights(ModelParameters(model))
    PackedWeights(ModelParameters(stock))
    fuse_gates(model, native_gate, torch.equal)
    gates = [module for module in model.modules() if isinstance(getattr(module, "act_fn", None), SiLUGate)]
    served = serves_linear(stock.get_output_embeddings())
    assert len(gates) == (3 if served and name in ("llama", "qwen2") else 0)
    ids = torch.tensor([prompt(33)])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt_oss"])
@torch.no_grad()
def test_norms_tried_on_weights_of_ones_keep_every_bit_after_a_push(name: str) -> None:
    kind = next(k for k in vars(import_module(f"transformers.models.{name}.modeling_{name}")).values() if is_norm(k))
    stock, served = (nn.ModuleDict({"norm": kind(64)}).bfloat16() for _ in range(2))
    fuse_norms(served)
    assert name != "llama" or fused._vector_width() is None or "forward" in vars(served["norm"])
    pushed, x = torch.randn(64).bfloat16(), (3 * torch.randn(1, 64, 64)).bfloat16()
    for model in (stock, served):
        model["norm"].weight.copy_(pushed)
    assert torch.equal(served["norm"](x), stock["norm"](x))


def is_norm(kind: object) -> bool:
    return isinstance(kind, type) and kind.__name__.endswith("RMSNorm")


class ClampedMLP(nn.Module):
    """A gated layer with a limit that small weights never reach."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.act_fn = limit, nn.SiLU()
        self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down_proj = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


@pytest.mark.parametrize(("limit", "same"), [(torch.inf, True), (7.0, False)])
def test_a_gate_with_a_limit_is_not_taken_for_one_without(limit: float, same: bool) -> None:
    layer = ClampedMLP(limit)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1e-3)
    if native.library() is not None:
        assert fused._same_gate(layer, SiLUGate(), torch.equal) is same


def replies(engine: Engine) -> Any:
    return roll_out(engine, REQUESTS)


@pytest.mark.parametrize(("staging", "method"), [("full", "flip"), ("full", "copy"), ("in_place", "flip")])
def test_packed_weights_follow_an_update(staging: str, method: CommitMethod, tmp_path: Path) -> None:
    folders = [tiny_models.build("qwen2", tmp_path / str(seed), seed) for seed in (0, 1, 2)]
    engine = exact_engine(folders[0], "bfloat16", weight_staging=staging, enable_prefix_caching=False)
    engine.runner.parameters.method = method
    seen = [replies(engine)]
    for seed in (1, 2, 0):
        tensors = saved_tensors(tiny_models.model("qwen2", seed).bfloat16(), tmp_path / f"saved-{seed}")
        staged = fill(engine.store, tensors, in_place=staging == "in_place")
        staged.check(partial=False, progress=lambda: None)
        if staging == "full":
            assert same_bits(replies(engine), seen[-1])  # received and packed, but not committed
        engine.store.commit(staged, f"v{seed}")
        engine.scheduler.commit(engine.store.epoch, "recompute")
        seen.append(replies(engine))
        if serves_linear(engine.runner.model.get_output_embeddings()):
            assert len(engine.runner.parameters.live.packed) == len(engine.runner.packed._products)
    for got, folder in zip(seen, [*folders, folders[0]], strict=True):
        assert same_bits(got, replies(exact_engine(folder, "bfloat16", enable_prefix_caching=False)))
    assert not same_bits(seen[0], seen[1])


class FakePacked:
    """A PackedWeight for any machine; a set that holds the value 7 is packed slowly."""

    reached, go = threading.Event(), threading.Event()

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        self.weight = torch.cat(weights).clone()
        if (weights[0] == 7).all():
            self.reached.set()
            assert self.go.wait(60)

    of = classmethod(lambda cls, weights, biases=(): cls(weights, biases))

    def multiply(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return x @ self.weight.T


@torch.inference_mode()
def test_an_update_that_was_dropped_while_it_was_packed_takes_nothing_from_what_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread used to delete the packed weights of a set committed meanwhile: a KeyError in the next step."""
    monkeypatch.setattr(fused, "PackedWeight", FakePacked)
    monkeypatch.setattr(fused, "serves_linear", lambda layer: type(layer) is nn.Linear)
    model, stock = tiny_models.model("llama", 0), tiny_models.model("llama", 1)
    parameters = ModelParameters(model)
    packed = PackedWeights(parameters)
    dropped = parameters.new_set()
    for tensor in dropped.tensors.values():
        tensor.fill_(7)
    packing = threading.Thread(target=packed.pack, args=[dropped])
    packing.start()
    assert FakePacked.reached.wait(60)
    committed = parameters.new_set()
    for name, tensor in stock.named_parameters():
        committed.tensors[name].copy_(tensor)
    packed.pack(committed)
    parameters.commit(committed)
    FakePacked.go.set()
    packing.join(60)
    ids = torch.tensor([prompt(9)])
    torch.testing.assert_close(model(ids).logits, stock(ids).logits)


def test_only_plain_layers_of_known_dtypes_are_taken() -> None:
    class Other(nn.Linear):
        pass

    assert serves_linear(nn.Linear(5, 4)) == products.multiplies(torch.float32)
    assert not serves_linear(nn.Linear(4, 4, dtype=torch.float16))
    assert not serves_linear(Other(4, 4, dtype=torch.bfloat16))
    assert not serves_linear(nn.Linear(5, 4, dtype=torch.bfloat16))
    assert not serves_linear(None)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no kernels loaded."""
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.mark.parametrize(
    ("environment", "warns"),
    [({"ROLLOUT_NATIVE": "0"}, False), ({"CXX": "/nowhere/c++"}, True), ({"CXX": "false"}, True)],
)
def test_without_a_compiler_there_are_no_kernels(
    environment: dict[str, str],
    warns: bool,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert native.library() is None
    assert ("can't be built" in caplog.text) is warns


def test_on_a_processor_that_the_kernels_are_not_made_for_no_compiler_is_run(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On one without AVX-512 they used to be compiled, for some 12 s, to be asked whether it has it."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    ran: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda *command, **_: ran.append(command))
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: ran.append(command))
    assert native.library() is None
    assert not ran
    assert not list(fresh.iterdir())
    assert not products.multiplies(torch.bfloat16)
    assert not caplog.text


@pytest.mark.parametrize(("set_of", "wide"), [("AVX512", True), ("AVX2", False)])
def test_the_flags_follow_what_torch_finds_the_processor_to_have(
    set_of: str, wide: bool, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: set_of)
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return build_in_words(command)

    monkeypatch.setattr(subprocess, "run", run)
    made = native._built(["c++"])
    assert ("-mno-avx512f" not in commands[-1]) is wide
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2" if wide else "AVX512")
    assert native._built(["c++"]) != made  # a cache may be shared


def test_every_processor_of_arm64_has_the_vectors_that_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute there `python -m tests.peers.arm64` compares, by a cross-compiler and an emulator."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert native.instruction_set() == "NEON"
    assert native.FLAGS_FOR["NEON"] == ["-mcpu=native"]


def test_a_compiler_without_openmp_builds_for_one_thread_and_says_so(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Apple's clang refuses the flag; on it there was no kernel at all."""
    source = tmp_path / "threads.cpp"
    source.write_text('extern "C" int threads() {\n#ifdef _OPENMP\nreturn 2;\n#else\nreturn 1;\n#endif\n}\n')
    monkeypatch.setattr(native, "SOURCES", [source])
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o700)
    assert ctypes.CDLL(str(native._built(["c++"]))).threads() == 2
    assert not caplog.text
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path / "other"))
    assert ctypes.CDLL(str(native._built([str(compiler)]))).threads() == 1
    assert "compiles no OpenMP (-fopenmp): the native kernels run on one thread" in caplog.text


def test_a_compiler_may_have_words_and_an_empty_cache_is_the_default_one(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if "-o" in command:
            Path(command[-1]).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "c++ 14", "")

    monkeypatch.setattr(native.subprocess, "run", run)
    monkeypatch.setenv("CXX", "ccache g++")
    monkeypatch.setenv("ROLLOUT_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert native.library() is None, "nothing was compiled"
    assert [command[:2] for command in asked] == [["ccache", "g++"]] * 2
    assert list((tmp_path / "home/.cache/rollout/native").glob("kernels-*.so"))


def test_without_a_compiler_plain_torch_serves(tmp_path: Path) -> None:
    code = """
import logging, sys
from tests.support import tiny_models
logging.basicConfig(stream=sys.stdout)
from pathlib import Path
from rollout.config import EngineConfig
from rollout.engine.engine import Engine
engine = Engine(EngineConfig(model=str(tiny_models.build("llama", Path(sys.argv[1]))), device="cpu", max_model_len=64))
print(type(engine.runner.backend).__name__)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin",
             "ROLLOUT_CACHE": str(tmp_path), "CXX": "false"},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "TorchAttention"
    assert "can't be built" in run.stdout


def test_kernels_are_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", build_in_words)
    made = native._built(["c++"])
    assert list((fresh / "native").iterdir()) == [made]
    made.write_text("built before")
    assert native._built(["c++"]).read_text() == "built before"


def build_in_words(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Stands in for the compiler: writes a file that says who made it."""
    if "-o" in command:
        Path(command[-1]).write_text("built here")
    return subprocess.CompletedProcess(command, 0, stdout="", stderr="")


@pytest.mark.parametrize("mode", [0o722, 0o720, 0o702])
def test_kernels_that_others_can_write_are_not_loaded(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", build_in_words)
    made = native._built(["c++"])
    made.write_text("by somebody else")
    made.chmod(mode)
    assert native._built(["c++"]).read_text() == "built here"
    assert made.stat().st_mode & 0o077 == 0

    made.unlink()
    (tmp_path / "elsewhere").write_text("by somebody else")
    made.symlink_to(tmp_path / "elsewhere")
    assert native._built(["c++"]).read_text() == "built here"

    made.parent.chmod(mode)
    native._built(["c++"])
    assert made.parent.stat().st_mode & 0o022 == 0


def test_kernels_of_another_user_are_neither_loaded_nor_built_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", build_in_words)
    made = native._built(["c++"])
    made.write_text("by somebody else")
    if os.geteuid() == 0:
        os.chown(made.parent, 4321, -1)  # root trusts nobody's
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    made.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="set ROLLOUT_CACHE to a folder of your own"):
        native._built(["c++"])
    assert made.read_text() == "by somebody else"
