"""Configuration: one dataclass for the engine, one for the server. The command line is derived from them.

Every field is a flag of `rollout serve` (`max_num_seqs` is `--max-num-seqs`); the `help` in its metadata is the flag's
help. Names are vLLM's wherever vLLM has one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
KVPolicy = Literal["keep", "recompute"]
WeightStaging = Literal["full", "host", "in_place"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
DataParallelBackend = Literal["mp", "ray"]
MAX_QUEUED = 8192  # choices: each takes memory in both processes, and time of every step
ToolCallParser = Literal[
    "deepseek_v3", "deepseek_v31", "glm45", "hermes", "kimi_k2", "llama3_json", "mistral", "qwen3_coder"
]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "mistral", "qwen3", "seed_oss"]
AttentionBackendName = Literal["auto", "native", "torch", "triton"]


def flag(default: Any, help: str, *, secret: bool = False) -> Any:
    """A field of a configuration that is a command-line flag with this help; a secret one is never shown."""
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret})


@dataclass(frozen=True)
class EngineConfig:
    """What one engine process needs. Raises ValueError, naming the field, on values that can't work."""

    model: str = flag(
        "", "Serve this: a transformers folder (safetensors), a .gguf file, or a hub id where there is a network."
    )
    dtype: Dtype = flag(
        "auto", "Compute in this dtype. auto: the checkpoint's, or float32 on a CPU that is slow in bf16."
    )
    device: Device = flag("auto", "Compute on this device. auto: cuda where there is one.")
    load_format: Literal["auto", "dummy"] = flag("auto", "Load MODEL's weights, or draw random ones (dummy).")
    seed: int | None = flag(None, "Seed the sampling (and dummy weights) with this. Default: a random seed.")
    max_model_len: int | None = flag(
        None, "Allow this many tokens of prompt and output together. Default: the model's own limit."
    )
    max_num_seqs: int = flag(256, "Run at most this many sequences in one step.")
    max_num_batched_tokens: int = flag(
        2048, "Compute at most this many tokens in one step: decodes plus prompt chunks."
    )
    block_size: int = flag(16, "Put this many tokens into one block of the KV cache.")
    kv_cache_memory_bytes: int | None = flag(
        None, "Give the KV cache this many bytes. Default: a share of free GPU memory, or at most 4 GiB on a CPU."
    )
    num_gpu_blocks_override: int | None = flag(None, "Give the KV cache this many blocks, whatever the memory.")
    gpu_memory_utilization: float = flag(0.9, "Use this share of GPU memory for weights, staging and cache together.")
    enable_prefix_caching: bool = flag(True, "Reuse the blocks of a shared prefix (never across weight epochs).")
    scheduling_policy: SchedulingPolicy = flag(
        "fcfs", "Order requests by arrival (fcfs), or by priority (lower values first, then arrival)."
    )
    kv_policy: KVPolicy | None = flag(
        None,
        "When weights change, keep the cache of running requests, or recompute it under the new ones. Default: keep; "
        "recompute with --batch-invariant.",
    )
    batch_invariant: bool = flag(False, "Give a request the same bits whatever else is in its batch; proved at start.")
    weight_staging: WeightStaging = flag(
        "full",
        "Receive weights into a second copy on the device (full) or in pinned host memory (host), or into the live "
        "weights while generation is paused (in_place).",
    )
    allow_partial_updates: bool = flag(False, "Accept updates that name only a subset of the parameters.")
    weight_update_timeout_s: float = flag(300.0, "Wait at most this many seconds for any one step of a weight update.")
    keep_weight_snapshot: str | None = flag(
        None, "Keep a copy of the last committed weights in this folder; an engine that is restarted goes on from it."
    )
    logprobs_mode: LogprobsMode = flag(
        "raw_logprobs",
        "Report the model's logprobs before any filter (raw_logprobs), or those of the distribution that is sampled "
        "(processed_logprobs).",
    )
    max_logprobs: int = flag(20, "Let a request ask for at most this many `logprobs` a token.")
    enable_return_routed_experts: bool = flag(False, "Add routed_experts to the answers of a mixture-of-experts model.")
    attention_backend: AttentionBackendName = flag(
        "auto",
        "Compute attention with this backend. auto: native (compiled once) or torch on a CPU, triton on CUDA.",
    )
    tensor_parallel_size: int = flag(1, "Split every layer of one engine's model over this many devices.")
    async_scheduling: bool | None = flag(
        None, "Launch a step before the tokens of the one before it are read. Default: on CUDA, with one device."
    )
    enable_lora: bool = flag(False, "Serve LoRA adapters, loaded by /v1/load_lora_adapter or --lora-modules.")
    max_loras: int = flag(16, "Run at most this many adapters in one step.")
    max_cpu_loras: int = flag(32, "Keep at most this many versions of adapters loaded; the oldest unused one goes.")
    max_lora_rank: int = flag(256, "Refuse adapters of a higher rank.")
    enforce_eager: bool = flag(False, "Never capture CUDA graphs.")
    enable_sleep_mode: bool = flag(
        False, "Serve /sleep and /wake_up, which lend the memory of weights and KV cache to a trainer."
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "Log messages of this level and above.")
    log_format: Literal["text", "json"] = flag("text", "Log to stderr as text, or as json, one object a line.")
    num_threads: int | None = flag(None, "Compute with this many CPU threads. Default: torch's.")

    @property
    def default_kv_policy(self) -> KVPolicy:
        """The policy of an update that names none."""
        return self.kv_policy or ("recompute" if self.batch_invariant else "keep")

    def __post_init__(self) -> None:
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "block_size", "tensor_parallel_size"),
            *("max_loras", "max_cpu_loras", "max_lora_rank"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or unset, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token a step"
            )
        if self.async_scheduling and (self.tensor_parallel_size > 1 or self.enable_return_routed_experts):
            raise ValueError(
                "async_scheduling can't be had with tensor_parallel_size above 1 or enable_return_routed_experts: "
                "both read every step on the host"
            )
        if not self.weight_update_timeout_s > 0:
            raise ValueError(f"weight_update_timeout_s must be positive, got {self.weight_update_timeout_s}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for flag, given, why in (
            ("batch_invariant", self.batch_invariant, "a sum over the ranks has another order than one rank's"),
            ("weight_staging in_place", self.weight_staging == "in_place", "a rank could be left half written"),
            ("keep_weight_snapshot", self.keep_weight_snapshot is not None, "a rank holds no whole parameters"),
            ("enable_sleep_mode", self.enable_sleep_mode, "its other ranks would stay awake"),
            ("enable_lora", self.enable_lora, "an adapter isn't cut like the layers that it adapts"),
        ):
            if given and self.tensor_parallel_size > 1:
                raise ValueError(f"{flag} can't be had with tensor_parallel_size {self.tensor_parallel_size}: {why}")


_OF_AN_ADAPTER = {"name", "path", "base_model_name"}


def named_adapter(module: str) -> tuple[str, str]:
    """The name and the folder in `name=path`, or in vLLM's JSON, whose `base_model_name` says nothing here.

    Raises ValueError for what is neither.
    """
    name, _, path = module.partition("=")
    if module.startswith("{"):
        try:
            given = json.loads(module)
        except json.JSONDecodeError:
            given = {}
        asked = {key for key, value in given.items() if value}  # is_3d_lora_weight may be false
        name, path = (given.get(key, "") if asked <= _OF_AN_ADAPTER else "" for key in ("name", "path"))
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(f'lora_modules must be name=path or {{"name": "…", "path": "…"}}, got {module!r}')
    return name, path


@dataclass(frozen=True)
class ServerConfig:
    """What the server process needs beside the engine's configuration. Raises ValueError, naming the field."""

    host: str = flag("127.0.0.1", "Listen on this address.")
    port: int = flag(8000, "Listen on this port; 0 picks a free one and prints it.")
    served_model_name: str | None = flag(None, "Let clients use this name for the model. Default: the model's path.")
    enable_scale_out: bool = flag(False, "Register /inference/v1/generate and its companions.")
    tokenizer: str | None = flag(None, "Load the tokenizer of this folder or hub id. Default: MODEL's.")
    chat_template: str | None = flag(None, "Render chats by this file, or this Jinja text. Default: the tokenizer's.")
    enable_auto_tool_choice: bool = flag(False, "Find tool calls in the text of chats, with --tool-call-parser.")
    tool_call_parser: ToolCallParser | None = flag(None, "Expect tool calls in the format of these models.")
    reasoning_parser: ReasoningParser | None = flag(None, "Expect reasoning in the format of these models.")
    tokens_only: bool = flag(False, "Serve token ids only: no tokenizer is loaded; implies --enable-scale-out.")
    skip_tokenizer_init: bool = flag(False, "Load no tokenizer: text and stop strings are refused.")
    return_sampling_mask: bool = flag(False, "Add the support of each sampled distribution to answers.")
    return_tokens_as_token_ids: bool = flag(False, "Write `token_id:N` in place of a token's text in text logprobs.")
    enable_force_include_usage: bool = flag(False, "End every stream with `usage`, asked for or not.")
    enable_prompt_tokens_details: bool = flag(False, "Say in `usage` how many prompt tokens the prefix cache had.")
    enable_per_request_metrics: bool = flag(False, "Say in `metrics` of answers with one choice how long they took.")
    pause_generation_aborts: bool = flag(
        True,
        "End running requests when SGLang's trainers ask for it (/pause_generation, abort_all_requests). When off, "
        "they go on while weights are pushed.",
    )
    lora_modules: tuple[str, ...] = flag(
        (),
        "With --enable-lora, load this adapter at start: name=path, of a folder of PEFT's, or JSON with name and path; "
        "may be repeated.",
    )
    trust_request_chat_template: bool = flag(False, "Accept the `chat_template` of a request.")
    api_key: tuple[str, ...] = flag(
        (),
        "Require this key, but for probes such as /health; may be repeated. Default: $ROLLOUT_API_KEY, $VLLM_API_KEY.",
        secret=True,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "Without a key, also serve web pages of this host, and requests that call the server by this name; may be "
        "repeated; * allows all. Default: its own pages and, on a loopback address, loopback names only.",
    )
    live_answers: bool = flag(False, "Show the text of the last answer on the page at /, to all who may open it.")
    max_queued_requests: int = flag(
        MAX_QUEUED, "Queue at most this many choices beyond --max-num-seqs; a request for more gets a 503."
    )
    max_body_bytes: int = flag(64 << 20, "Answer a request whose body has more bytes with a 413.")
    receive_timeout_s: float = flag(
        30.0, "Drop a request when more than this many seconds pass between two parts of its body."
    )
    shutdown_timeout: float = flag(
        0.0, "Let running requests finish for this many seconds after SIGTERM; then they are aborted."
    )
    engine_start_timeout_s: float = flag(600.0, "Wait at most this many seconds for the engine to load the model.")
    engine_stall_timeout_s: float = flag(
        300.0,
        "Declare an engine dead when it has said nothing for this many seconds, and then leaves a probe unanswered for "
        "as long again.",
    )
    engine_restarts: int = flag(
        3, "Restart a dead engine at most this many times in 10 minutes; after that it stays dead."
    )
    data_parallel_size: int = flag(
        1, "Run this many engines, each with the whole model; on CUDA, each with devices of its own."
    )
    data_parallel_backend: DataParallelBackend = flag(
        "mp", "Run engines as processes of this machine (mp), or as actors of a Ray cluster, behind Ray Serve (ray)."
    )
    enable_log_requests: bool = flag(False, "Log each request as it ends: its id, tokens, seconds, engine and weights.")
    uvicorn_log_level: LogLevel = flag("warning", "Log messages of the HTTP server (uvicorn) of this level and above.")

    def __post_init__(self) -> None:
        if not all(self.api_key):
            raise ValueError("api_key must not be empty: it would guard nothing")
        template = self.chat_template
        if template is not None and not {"{", "}"} <= set(template) and not Path(template).is_file():
            raise ValueError(f"chat_template must be a file or a Jinja text, got {template!r}: there is no such file")
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs a tool_call_parser: how does this model write tool calls?")
        for module in self.lora_modules:
            named_adapter(module)
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests must be at least 0, got {self.max_queued_requests}")
        if self.data_parallel_size < 1:
            raise ValueError(f"data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if not self.receive_timeout_s > 0:
            raise ValueError(f"receive_timeout_s must be positive, got {self.receive_timeout_s}")
        if not self.shutdown_timeout >= 0:
            raise ValueError(f"shutdown_timeout must be at least 0, got {self.shutdown_timeout}")
