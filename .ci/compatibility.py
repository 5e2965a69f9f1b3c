"""Write docs/compatibility.md from the code: which endpoints, fields and flags are served, refused or without effect.

python .ci/compatibility.py > docs/compatibility.md
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollout.cli.accepted import IGNORED as IGNORED_FLAGS
from rollout.cli.accepted import REFUSED as REFUSED_FLAGS
from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.fleet import Fleet
from rollout.sampling.params import SamplingParams
from rollout.server.absent import ABSENT
from rollout.server.app import create_app
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.chat import ChatCompletionRequest
from rollout.server.wire.completions import CompletionRequest
from rollout.server.wire.fields import NO_EFFECT, REFUSED, Refusal
from rollout.server.wire.sglang import SGLangRequest, SGLangSampling
from rollout.server.wire.sglang_fields import NO_EFFECT as SGLANG_NO_EFFECT
from rollout.server.wire.sglang_fields import OF_VLLM
from rollout.server.wire.sglang_fields import REFUSED as SGLANG_REFUSED
from rollout.server.wire.tokens import GenerateRequest

_OUTCOMES = Path(__file__).parents[1] / "tests" / "data" / "vllm_outcomes.json"
_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}

# By path, the fields that its body declares: those of `sampling_params` are named alone.
DIALECTS: dict[str, set[str]] = {
    "/inference/v1/generate": (set(GenerateRequest.model_fields) - {"features", "content_parts"}) | _PARAMS,
    "/v1/completions": set(CompletionRequest.model_fields),
    "/v1/chat/completions": set(ChatCompletionRequest.model_fields),
    "/v1/messages": set(MessagesRequest.model_fields),
}

_HEAD = """# Compatibility

Which endpoints, fields and flags are served, which are refused and why, and which have no effect. Made from the code by
`make compatibility`; a test holds it against the code, and the code's tables against the request models of vLLM 0.33
(`python -m tests.peers.vllm_source` takes their names from its source).

A field that is in none of these tables is ignored, and named in `X-Ignored-Parameters`.
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _endpoints() -> Iterator[str]:
    options: dict[str, Any] = {"enable_scale_out": True, "skip_tokenizer_init": True}
    all_on = EngineConfig(enable_sleep_mode=True, enable_lora=True)
    full = create_app(Fleet(EngineConfig()), all_on, ServerConfig(**options)).openapi()
    yield "\n## Endpoints\n\nServed, with what each does:\n"
    yield _row("path", "")
    yield _row("---", "---")
    for path, operations in sorted(full["paths"].items()):
        methods = " ".join(method.upper() for method in operations)
        said = next(iter(operations.values())).get("description", "").split("\n\n")[0]
        yield _row(f"`{methods} {path}`", " ".join(said.split()))
    yield "\nOf vLLM's, not offered. Each answers with a 404 that says what to use:\n"
    yield from _reasons("path", ABSENT)


def _fields() -> Iterator[str]:
    yield "\n## Fields\n"
    yield "Served, by the path of their dialect (of /inference/v1/generate those of `sampling_params` too); render"
    yield "takes what its dialect takes. Where a field isn't served, the two tables after this one say what becomes of"
    yield "it.\n"
    yield _row("field", *(f"`{path}`" for path in DIALECTS))
    yield _row("---", *("---" for _ in DIALECTS))
    for name in sorted(set().union(*DIALECTS.values())):
        yield _row(f"`{name}`", *("served" if name in served else _fate(name) for served in DIALECTS.values()))
    yield "\nRefused by name (400) where they aren't served, but for these values, which ask for nothing:\n"
    yield from _refusals(REFUSED)
    yield "\nWithout effect, and passed in silence where they aren't served:\n"
    yield from _reasons("field", NO_EFFECT)


def _refusals(table: Mapping[str, Refusal]) -> Iterator[str]:
    yield _row("field", "passes", "why")
    yield _row("---", "---", "---")
    for name, (why, harmless) in sorted(table.items()):
        yield _row(f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in (None, *harmless)), why)


def _sglang() -> Iterator[str]:
    params = (f"sampling_params.{name}" for name in SGLangSampling.model_fields)
    served = sorted([*SGLangRequest.model_fields.keys() - {"sampling_params"}, *params])
    yield "\n## Fields of SGLang's /generate\n"
    yield "Every field of sglang 0.5.23 is in one of these lists. Served:"
    yield from textwrap.wrap(", ".join(f"`{name}`" for name in served) + ".", 120)
    yield '\nRefused by name (400), but for these values, 0, `""`, `[]`, `{}` and `false`, which ask for nothing:\n'
    yield from _refusals(SGLANG_REFUSED)
    yield "\nvLLM's and OpenAI's, refused by name (400) here and within `sampling_params`, but for these values:\n"
    yield from _refusals(OF_VLLM)
    yield "\nWithout effect, and passed in silence:\n"
    yield from _reasons("field", SGLANG_NO_EFFECT)
    yield "\nSkyRL sends vLLM's fields to vLLM's paths; of /collective_rpc `method` and `kwargs` are read."


def _fate(name: str) -> str:
    return "refused" if name in REFUSED else "no effect" if name in NO_EFFECT else ""


def _ignored(why: str, has_value: bool, only: tuple[str, ...], never: tuple[str, str] | None) -> str:
    but = "" if never is None else f" (but not {never[0]}: {never[1]})"
    return f"{why} ({' or '.join(only)} alone)" if only else why + but


def _flags() -> Iterator[str]:
    yield "\n## Flags\n"
    yield "`rollout serve` has flags of its own (`rollout serve --help`), with vLLM's names wherever vLLM has one."
    yield "Those below are vLLM's, as launch scripts pass them. Accepted with a line that says that they are ignored:\n"
    yield from _reasons("flag", {name: _ignored(*flag) for name, flag in IGNORED_FLAGS.items()})
    yield "\nRefused, since to ignore them would serve something else:\n"
    yield from _reasons("flag", REFUSED_FLAGS)


def _reasons(what: str, table: Mapping[str, str]) -> Iterator[str]:
    yield _row(what, "why")
    yield _row("---", "---")
    for name, why in sorted(table.items()):
        yield _row(f"`{name}`", why)


def _tests() -> Iterator[str]:
    outcomes: dict[str, tuple[str, str]] = json.loads(_OUTCOMES.read_text())
    counts = Counter((test.partition("::")[0], kind) for test, (kind, _) in outcomes.items())
    kinds = ("passed", "refused", "inapplicable", "failed")
    yield "\n## vLLM's own tests\n"
    yield "Files below its `tests/entrypoints` that a text model may pass, run against `rollout serve` on SmolLM2 by"
    yield "`python -m tests.peers.vllm_tests`, as last recorded: tests/data/vllm_outcomes.json has each test, and why"
    yield "it doesn't pass. Refused: by a word that says so. Inapplicable: calls vLLM's own code, or needs a GPU,"
    yield "adapters or a network.\n"
    yield _row("file", *kinds)
    yield _row("---", *("---" for _ in kinds))
    for file in sorted({file for file, _ in counts}):
        yield _row(f"`{file}`", *(str(counts[file, kind] or "") for kind in kinds))
    yield _row("all", *(str(sum(n for (_, one), n in counts.items() if one == kind)) for kind in kinds))
    yield "\nFailed, and why:\n"
    whys: dict[str, list[str]] = {}
    for test, (kind, why) in sorted(outcomes.items()):
        if kind == "failed":
            whys.setdefault(why, []).append(test.rpartition("::")[2].partition("[")[0])
    yield _row("why", "tests")
    yield _row("---", "---")
    for why, tests in whys.items():
        yield _row(why, ", ".join(f"`{test}`" for test in dict.fromkeys(tests)))


def page() -> str:
    """The page's text."""
    return "\n".join([_HEAD.rstrip("\n"), *_endpoints(), *_fields(), *_sglang(), *_flags(), *_tests()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
