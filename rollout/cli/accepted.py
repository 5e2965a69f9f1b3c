"""vLLM's flags, as launch scripts pass them, that `rollout serve` hasn't: ignored with a line, or refused.

A command line is read as vLLM reads it first: `--max_model_len` is `--max-model-len`, `-tp` is
`--tensor-parallel-size`, and `--model M` is the positional MODEL.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand


class Ignored(NamedTuple):
    """Why a flag says nothing here; whether it has a value, the only ones (if any) that may be ignored, and a word that
    no value may hold, with the reason."""

    why: str
    has_value: bool = True
    only: tuple[str, ...] = ()
    never: tuple[str, str] | None = None


_SPEED = "how it is computed is chosen by this engine"
_TRANSPORT = "the trainer's /init_weight_transfer_engine chooses the transport"
_LOGS = "see --log-level and --uvicorn-log-level"
_TEXT = "models take and give text alone"
_PAGES = "see --allowed-hosts for web pages"
_NODES = "engines on other machines are Ray's: --data-parallel-backend ray"
_CODE = "no code but this package's own runs in server and engine"
_CACHE = "no cache is transferred"
_PROXY = "put a proxy that speaks TLS before the server"
_OTHER_MODEL = "the model's own configuration is served: change its folder"


def _switch(why: str) -> Ignored:
    return Ignored(why, has_value=False)


IGNORED: dict[str, Ignored] = {
    "--all2all-backend": Ignored(_SPEED),
    "--allow-credentials": _switch(_PAGES),
    "--allowed-headers": Ignored(_PAGES),
    "--allowed-methods": Ignored(_PAGES),
    "--allowed-origins": Ignored(_PAGES),
    "--api-server-count": Ignored("one server process is in front of all engines"),
    "--attention-config": Ignored(_SPEED),
    "--chat-template-content-format": Ignored("templates are given texts", only=("auto", "string")),
    "--collect-detailed-traces": Ignored("no traces are sent: see /metrics"),
    "--compilation-config": Ignored(_SPEED),
    "--config-format": Ignored("transformers reads the configuration", only=("auto", "hf")),
    "--convert": Ignored("models generate", only=("auto", "none")),
    "--cpu-offload-gb": Ignored("weights stay on the device", only=("0", "0.0")),
    "--cudagraph-capture-sizes": Ignored(_SPEED),
    "--disable-cascade-attn": _switch(_SPEED),
    "--disable-custom-all-reduce": _switch(_SPEED),
    "--disable-fastapi-docs": _switch("/docs says no more than the code, and needs the key where there is one"),
    "--disable-frontend-multiprocessing": _switch("server and engines are processes of their own"),
    "--disable-hybrid-kv-cache-manager": _switch(_SPEED),
    "--disable-log-requests": _switch("requests are logged with --enable-log-requests alone"),
    "--disable-log-stats": _switch("counts are read at /metrics, and not logged"),
    "--disable-uvicorn-access-log": _switch(_LOGS),
    "--distributed-executor-backend": Ignored("see --data-parallel-backend; the ranks of an engine are processes"),
    "--download-dir": Ignored("set HF_HOME in the environment"),
    "--enable-chunked-prefill": _switch("prompts are always computed in chunks, see --max-num-batched-tokens"),
    "--enable-eplb": _switch(_SPEED),
    "--enable-expert-parallel": _switch(_SPEED),
    "--enable-request-id-headers": _switch("every answer's id holds the request's X-Request-Id"),
    "--enable-server-load-tracking": _switch("/metrics tells the load"),
    "--enable-tokenizer-info-endpoint": _switch("read the tokenizer's configuration from the model's folder"),
    "--fail-on-environ-validation": _switch("vLLM's environment isn't read, but for VLLM_API_KEY"),
    "--generation-config": Ignored("parameters that a request leaves out have vLLM's own defaults", only=("vllm",)),
    "--guided-decoding-backend": Ignored("grammars have one library here"),
    "--hf-token": Ignored("set HF_TOKEN in the environment"),
    "--kv-cache-dtype": Ignored("the cache has the model's dtype", only=("auto",)),
    "--language-model-only": _switch(_TEXT),
    "--limit-mm-per-prompt": Ignored(_TEXT),
    "--long-prefill-token-threshold": Ignored(_SPEED),
    "--max-cudagraph-capture-size": Ignored(_SPEED),
    "--max-log-len": Ignored("requests are never logged"),
    "--max-parallel-loading-workers": Ignored(_SPEED),
    "--max-seq-len-to-capture": Ignored(_SPEED),
    "--mm-processor-cache-gb": Ignored(_TEXT),
    "--model-impl": Ignored("the model is transformers'", only=("auto", "transformers")),
    "--moe-backend": Ignored(_SPEED),
    "--num-scheduler-steps": Ignored(_SPEED),
    "--optimization-level": Ignored(_SPEED),
    "--otlp-traces-endpoint": Ignored("no traces are sent: see /metrics"),
    "--performance-mode": Ignored(_SPEED),
    "--pipeline-parallel-size": Ignored("a model is split within its layers", only=("1",)),
    "--prefix-caching-hash-algo": Ignored("prefixes are compared token by token"),
    "--profiler-config": Ignored("see `rollout bench`"),
    "--quantization": Ignored("weights are served in the dtype they are stored in", only=("none", "None")),
    "--renderer-num-workers": Ignored(_SPEED),
    "--response-role": Ignored("answers are the assistant's", only=("assistant",)),
    "--revision": Ignored("the newest is served", only=("main",)),
    "--runner": Ignored("models generate", only=("auto", "generate")),
    "--safetensors-load-strategy": Ignored(_SPEED),
    "--show-hidden-metrics-for-version": Ignored("/metrics hides none"),
    "--speculative-config": Ignored("tokens are decoded one at a time, from the same distribution"),
    "--stream-interval": Ignored("each event of a stream brings what there is by then"),
    "--structured-outputs-config": Ignored(
        "grammars have one library here; requests say the rest",
        never=("enable_in_reasoning", "grammars hold after the reasoning; without --reasoning-parser, from the start"),
    ),
    "--swap-space": Ignored("sequences that are preempted are computed again"),
    "--task": Ignored("models generate", only=("auto", "generate")),
    "--tokenizer-mode": Ignored("the tokenizer is transformers'", only=("auto", "hf", "slow")),
    "--use-tqdm-on-load": _switch("nothing is drawn while weights load"),
    "--weight-transfer-config": Ignored(_TRANSPORT),
}

REFUSED: dict[str, str] = {
    "--data-parallel-address": _NODES,
    "--data-parallel-rank": _NODES,
    "--data-parallel-size-local": _NODES,
    "--data-parallel-start-rank": _NODES,
    "--default-chat-template-kwargs": "send chat_template_kwargs with each request",
    "--disable-sliding-window": _OTHER_MODEL,
    "--ec-transfer-config": _CACHE,
    "--enable-prompt-embeds": "a prompt is a text or token ids",
    "--exclude-tools-when-tool-choice-none": "a template is given the tools of the request: leave them out of it",
    "--headless": _NODES,
    "--hf-config-path": _OTHER_MODEL,
    "--hf-overrides": _OTHER_MODEL,
    "--kv-events-config": _CACHE,
    "--kv-transfer-config": _CACHE,
    "--logits-processors": _CODE,
    "--middleware": _CODE,
    "--node-rank": _NODES,
    "--nnodes": _NODES,
    "--override-generation-config": "send the parameters with each request",
    "--reasoning-parser-plugin": _CODE,
    "--root-path": "have the proxy strip its prefix",
    "--scheduler-cls": _CODE,
    "--ssl-ca-certs": _PROXY,
    "--ssl-certfile": _PROXY,
    "--ssl-keyfile": _PROXY,
    "--tokenizer-revision": "give --tokenizer a folder that holds it",
    "--tool-parser-plugin": _CODE,
    "--tool-server": "this server runs no tools",
    "--trust-remote-code": "no code from a model's repository is run: serve a model that transformers knows",
    "--uds": "the server listens on --host and --port",
    "--watermark-config": "nothing is watermarked",
    "--worker-cls": _CODE,
    "--worker-extension-cls": f"{_CODE}: the weight calls have paths of their own",
}

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-dp": "--data-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-ep": "--enable-expert-parallel",
}


_SEVERAL = "--lora-modules"


def _one_each(arguments: Sequence[str]) -> Iterator[str]:
    """Each value of --lora-modules, of which vLLM takes several in a row, behind a flag of its own."""
    listing = awaited = False
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, _ = argument.partition("=")
            listing = name.replace("_", "-") == _SEVERAL
            awaited = listing and not equals
        elif awaited:
            awaited = False
        elif listing and (argument.startswith("{") or ("=" in argument and not os.path.isdir(argument))):
            yield _SEVERAL
        else:
            listing = False  # MODEL
        yield argument


def accepted(arguments: Sequence[str]) -> Iterator[str]:
    """These arguments as `rollout serve` knows them, without those that it ignores: one line to stderr says which.

    Raises typer.BadParameter for a flag that it refuses.
    """
    rest = _one_each(arguments)
    for argument in rest:
        if argument == "--":
            yield argument
            yield from rest
            return
        name, equals, value = argument.partition("=")
        if name[:2] == "-O" and name[2:].isdigit():
            name = "--optimization-level"
            value, equals = argument[2:], "="
        name = _SHORT.get(name, name)
        if name.startswith("--"):
            name = name.replace("_", "-")
        known = name.partition(".")[0]  # --compilation-config.mode 3
        positive = "--" + known.removeprefix("--no-")
        if known == "--model":
            yield value if equals else next(rest, "")
        elif (why := REFUSED.get(known)) is not None:
            raise typer.BadParameter(f"vLLM's flag isn't served: {why}.", param_hint=known)
        elif (ignored := IGNORED.get(known) or IGNORED.get(positive)) is None:
            yield name + equals + value
        else:
            if ignored.has_value and not equals:
                value = next(rest, "")
            if ignored.only and value not in ignored.only:
                only = " or ".join(ignored.only)
                raise typer.BadParameter(f"must be {only} here, got {value!r}: {ignored.why}.", param_hint=known)
            if ignored.never and ignored.never[0] in (name + value).replace("-", "_"):
                raise typer.BadParameter(f"{ignored.never[0]} isn't served: {ignored.never[1]}.", param_hint=known)
            typer.echo(f"rollout: vLLM's {known} is ignored: {ignored.why}", err=True)


class ServeCommand(TyperCommand):
    """A command that takes vLLM's command lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, of what `accepted` leaves."""
        return super().parse_args(ctx, list(accepted(args)))
