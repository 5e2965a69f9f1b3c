"""The native kernels: compiled once on the user's machine, for its instruction set, and kept in the cache folder.

Without a C++ compiler, on a processor that they aren't made for, or where the build fails, everything runs in plain
torch, slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import torch

from rollout.folders import OwnedFolder

logger = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cpp", "vectors.h")]
"""What is compiled, and what it includes."""
FLAGS = ["-O3", "-shared", "-fPIC", "-std=c++17", "-Wno-psabi", "-ffp-contract=off"]
THREADED = "-fopenmp"
"""The flag without which the kernels run on one thread. Not every compiler has it: Apple's doesn't."""
BUILD_TIMEOUT_S = 120
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
"""The dtypes that the kernels know, and what their names end in."""
FLAGS_FOR = {"AVX512": ["-march=native"], "AVX2": ["-march=native", "-mno-avx512f"], "NEON": ["-mcpu=native"]}
"""By instruction set, the flags that decide how wide vectors are. `ATEN_CPU_CAPABILITY=avx2` has an AVX-512 processor
taken for one of AVX2, by torch and here."""
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
SIGNATURES = {
    "attend_bf16": "pppp pp iiiii pipi pppp pi fif ppp i",
    "attend_f32": "pppp pp iiiii pipi pppp pi fif ppp i",
    "rotate_bf16": "pll ppp iii",
    "rotate_f32": "pll ppp iii",
    "normalize_bf16": "pp f p lii",
    "normalize_f32": "pp f p lii",
    "gate_bf16": "pplp li",
    "pack_bf16": "plip",
    "pack_f32": "plip",
    "multiply_bf16": "ppp lli pi",
    "multiply_f32": "ppp lli pi",
    "draw_f32": "pli ppp i",
    **{f"adapt_{name}": "pl pl ii p ppp p i" for name in ("f32_f32", "bf16_bf16", "bf16_f32", "f32_bf16")},
    "use_huge_pages": "pl",
}
"""The arguments of the kernels, a letter of TYPES each. They return nothing."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if they haven't been; None where they can't be, or where ROLLOUT_NATIVE=0 forbids them.

    A processor without AVX2 is asked before any compiler: the kernels would be slower than torch on it.
    """
    if os.environ.get("ROLLOUT_NATIVE") == "0" or instruction_set() is None:
        return None
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), "")
    compiler = shlex.split(os.environ.get("CXX", "")) or [found]  # a command may have words: CXX="ccache g++"
    if compiler == [""]:
        logger.warning("No C++ compiler (c++) was found: attention runs in plain torch, several times slower.")
        return None
    try:
        kernels = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        logger.warning("The native kernels can't be built, plain torch is used instead, slower: %s", detail)
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes = [TYPES[letter] for letter in arguments.replace(" ", "")]
        function.restype = None
    return kernels


def instruction_set() -> str | None:
    """Which of FLAGS_FOR this processor has, by torch's account; None where the kernels aren't made for it.

    Every processor of arm64 has NEON.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return "NEON"
    capability = torch.backends.cpu.get_cpu_capability()
    return capability if capability in FLAGS_FOR else None


def _built(compiler: list[str]) -> Path:
    """The shared library for this source, compiler and machine; for one thread where the compiler has no OpenMP."""
    try:
        return _build(compiler, [*FLAGS, THREADED])
    except subprocess.CalledProcessError:
        path = _build(compiler, FLAGS)
        logger.warning(
            "%s compiles no OpenMP (%s): the native kernels run on one thread. Name a compiler that does, for example "
            "CXX=g++-14 or CXX=$(brew --prefix llvm)/bin/clang++.",
            shlex.join(compiler),
            THREADED,
        )
        return path


def _build(compiler: list[str], flags: list[str]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    flags = [*flags, *FLAGS_FOR[instruction_set() or "AVX2"]]
    identity = "\0".join([*(source.read_text() for source in SOURCES), *flags, version, _processor()])
    folder = Path(os.environ.get("ROLLOUT_CACHE") or "~/.cache/rollout").expanduser() / "native"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(folder)
    if not (path.exists() and _is_private(path.lstat())):
        with OwnedFolder("build-", folder) as scratch:
            made = scratch.path / path.name
            command = [*compiler, *flags, str(SOURCES[0]), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_TIMEOUT_S)
            made.chmod(0o700)
            made.replace(path)  # at once: another process may be doing the same
    return path


def _is_private(status: os.stat_result) -> bool:
    """Whether nobody but this user and root can have written it: what is loaded from there runs as this user."""
    written_by_others = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) or stat.S_ISLNK(status.st_mode)
    return status.st_uid in (0, os.geteuid()) and not written_by_others


def _make_private(folder: Path) -> None:
    """Take others' right to write in the folder away. Raises PermissionError where it is somebody else's."""
    status = folder.stat()
    if status.st_uid == os.geteuid():
        folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    elif not _is_private(status):
        raise PermissionError(
            f"kernels are neither loaded from {folder} nor built there: user {status.st_uid} owns it; "
            "set ROLLOUT_CACHE to a folder of your own"
        )


def _processor() -> str:
    """What the processor can do: a cache folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's elements lie, as the kernels take it. The caller keeps the tensor alive."""
    return tensor.data_ptr()


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, not yet written to, whose memory will come in huge pages where the system has them."""
    kernels = library()
    if kernels is not None and tensor.device.type == "cpu":
        kernels.use_huge_pages(address(tensor), tensor.nbytes)
    return tensor


def keep_freed_memory() -> None:
    """Have this process keep what a step frees for the next one, instead of getting cleared pages each time."""
    kernels = library()
    if kernels is not None:
        kernels.keep_freed_memory()
