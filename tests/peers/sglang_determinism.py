"""SGLang's own test of determinism, as its package has it, against `rollout serve --batch-invariant` of a tiny model.

    python -m tests.peers.sglang_determinism FOLDER [--modes single prefix radix_cache] [flags of SGLang's test]

FOLDER has sglang 0.5.23 unpacked (pip download --no-deps). The test is imported from there, without the packages
above it, which need a GPU; of its imports one has a stand-in, the profiler, which it calls only when asked to. Prompts,
batches and counts are its own: 50 trials of 1 to 50 prompts, and prefixes of 1 to 4097 characters.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rollout.launch import serve
from tests.support import text_server, tiny_models
from tests.support.sglang_trainer import lengthen

# The radix mode sends ids up to 50,000.
_LARGEST_ID = 50_000


def load(folder: Path) -> Any:
    """The test's module."""
    for name in ("sglang", "sglang.test"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    profiler: Any = types.ModuleType("sglang.profiler")
    profiler.run_profile = None
    sys.modules["sglang.profiler"] = profiler
    return importlib.import_module("sglang.test.test_deterministic")


def build(folder: Path, vocab_size: int) -> Path:
    """A tiny model with a tokenizer, which takes prompts of 4097 characters; its vocabulary has so many tokens."""
    path = lengthen(tiny_models.build("llama", folder))
    if vocab_size > tiny_models.config("llama").vocab_size:
        model = AutoModelForCausalLM.from_pretrained(path)
        torch.manual_seed(0)
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        model.save_pretrained(path)
    text_server.tokenizer().save_pretrained(path)
    return path


def main() -> None:
    """Run the modes; ends with an error at the first that finds two outputs where one should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--modes", nargs="+", default=["single", "prefix", "radix_cache"])
    chosen, theirs = parser.parse_known_args()
    test = load(chosen.folder)
    flags_of_test = argparse.ArgumentParser()
    test.BenchArgs.add_cli_args(flags_of_test)
    flags = ["--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--batch-invariant"]
    flags += ["--max-num-seqs", "64"]
    for mode in chosen.modes:
        with tempfile.TemporaryDirectory() as folder:
            path = build(Path(folder) / "model", _LARGEST_ID + 1 if mode == "radix_cache" else 0)
            with serve(path, Path(folder) / "log", *flags) as url:
                host, _, port = url.removeprefix("http://").partition(":")
                began = time.monotonic()
                asked = [*theirs, "--host", host, "--port", port, "--test-mode", mode]
                result = test.test_deterministic(flags_of_test.parse_args(asked))
        print(f"{mode}: {result} in {time.monotonic() - began:.0f} s")
        assert set(result) == {1}, (mode, result)


if __name__ == "__main__":
    main()
