"""What becomes of the fields of SGLang's `/generate` that aren't served, and how it asks for structured outputs.

Names are those of sglang 0.5.23 (`managers/io_struct.py`, `sampling/sampling_params.py`); a test holds the tables
against them. Of a refused field null, 0, "", [], {} and false ask for nothing. `OF_VLLM` has what other dialects serve
or refuse: SGLang's server ignores it in silence, which would be another answer than the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout.sampling.params import ParameterError, StructuredOutputsParams
from rollout.server.wire.fields import REFUSED as REFUSED_ELSEWHERE
from rollout.server.wire.fields import Refusal, refuse_unserved

_MEDIA = "only text is served"
_TRANSFER = "this server runs a model whole, and transfers no cache"
_PROMPT = "a prompt is a text or token ids"
_ENGINE = "hidden states and scores within a model don't leave the engine"
_WATERMARK = "nothing is watermarked"
_FLAT = "logprobs have one form: send top_logprobs_num alone"
_PROCESSOR = "no code of a client's runs in the sampler"

REFUSED: dict[str, Refusal] = {
    **dict.fromkeys(("image_data", "video_data", "audio_data"), Refusal(_MEDIA)),
    "lora_id": Refusal("send the adapter's name as lora_path"),
    **dict.fromkeys(("bootstrap_room", "bootstrap_host"), Refusal(_TRANSFER)),
    **dict.fromkeys(("input_embeds", "positional_embed_overrides"), Refusal(_PROMPT)),
    **dict.fromkeys(("return_hidden_states", "return_indexer_topk", "return_entropy"), Refusal(_ENGINE)),
    **dict.fromkeys(("multi_item_delimiter_indices", "token_indices_to_pool"), Refusal(_ENGINE)),
    **dict.fromkeys(("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"), Refusal(_FLAT)),
    "background": Refusal("an answer is read by who asked for it"),
    "custom_logit_processor": Refusal(_PROCESSOR),
    "max_thinking_tokens": Refusal("thinking isn't counted: send max_new_tokens"),
    "require_reasoning": Refusal("the server's --reasoning-parser says that grammars hold after the reasoning"),
    "sampling_logprobs_mode": Refusal("send top_logprobs_num for the logprobs of others", ("selected",)),
    "session_params": Refusal("a prompt is sent whole; X-Session-ID keeps a dialogue at its engine"),
    "watermark": Refusal(_WATERMARK),
    "sampling_params.beam_width": Refusal("there is no beam search: every choice is sampled", (1,)),
    "sampling_params.stop_regex": Refusal("stop strings are plain: send stop"),
    "sampling_params.structural_tag": Refusal("send regex, json_schema or ebnf"),
    "sampling_params.watermark": Refusal(_WATERMARK),
}

_MEDIA_FORM = "the form of media, which aren't served"
_ROUTER = "tells SGLang's routers, logs and caches something"
_DISAGGREGATED = "of a disaggregated server, which this isn't"

NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        ("mm_hashes", "mm_content_hashes", "use_audio_in_video", "video_config", "modalities", "images_config"),
        _MEDIA_FORM,
    ),
    **dict.fromkeys(
        ("max_dynamic_patch", "min_dynamic_patch", "image_max_dynamic_patch", "video_max_dynamic_patch"), _MEDIA_FORM
    ),
    **dict.fromkeys(("mm_processor_kwargs", "return_bytes", "need_wait_for_mm_inputs", "encoder_urls"), _MEDIA_FORM),
    **dict.fromkeys(("routing_key", "conversation_id", "extra_key", "custom_labels", "http_worker_ipc"), _ROUTER),
    **dict.fromkeys(("log_metrics", "no_logs", "external_trace_header", "received_time", "kv_hints"), _ROUTER),
    **dict.fromkeys(
        ("bootstrap_port", "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank", "num_items_assigned"),
        _DISAGGREGATED,
    ),
    "return_flat_raw_top_logprobs_b64": "of return_flat_raw_top_logprobs, which is refused",
    "sampling_params.stream_interval": "each event of a stream brings what there is by then",
}

_FORM = "send regex, json_schema or ebnf within sampling_params"
_CHAT = "it is a chat's: send it to /v1/chat/completions"
_PROMPT_LOGPROBS = "send return_logprob and logprob_start_len"
_IDS = "the prompt's ids are told: send return_prompt_token_ids"

_OWN: dict[str, Refusal] = {
    **dict.fromkeys(("structured_outputs", "response_format", "output_config"), Refusal(_FORM, ({},))),
    "structural_tag": Refusal(_FORM),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), Refusal(_FORM)),
    **dict.fromkeys(("guided_whitespace_pattern", "regex", "json_schema", "ebnf"), Refusal(_FORM)),
    **dict.fromkeys(("tools", "functions"), Refusal(_CHAT, ([],))),
    **dict.fromkeys(("tool_choice", "function_call"), Refusal(_CHAT, ("auto", "none"))),
    **dict.fromkeys(("prompt_logprobs", "prompt_logprob_start"), Refusal(_PROMPT_LOGPROBS)),
    **dict.fromkeys(("return_prompt_text", "return_token_offsets"), Refusal(_IDS, (False,))),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refusal("send max_new_tokens within sampling_params")),
    "allowed_token_ids": Refusal("send a regex, or ask /inference/v1/generate, which serves it"),
    "bad_words": Refusal("send logit_bias, or ask /inference/v1/generate, which serves it", ([],)),
    "echo": Refusal(_IDS, (False,)),
    "include_stop_str_in_output": Refusal("send no_stop_trim within sampling_params", (False,)),
    "logprob_token_ids": Refusal("send return_logprob and token_ids_logprob", ([],)),
    "logprobs": Refusal("send return_logprob and top_logprobs_num", (False,)),
    "min_tokens": Refusal("send min_new_tokens within sampling_params", (0,)),
    "parallel_tool_calls": Refusal(_CHAT, (True,)),
    "prompt_logprob_token_ids": Refusal(_PROMPT_LOGPROBS),
    "routed_experts_prompt_start": Refusal("send routed_experts_start_len", (0,)),
    "seed": Refusal("send sampling_seed within sampling_params", (-1,)),
    "thinking_token_budget": Refusal("thinking isn't counted: send max_new_tokens", (-1,)),
    "thinking": Refusal(_CHAT, ({"type": "adaptive"},)),
    "top_logprobs": Refusal("send return_logprob and top_logprobs_num", (0,)),
    "verbosity": Refusal(_CHAT),
}

OF_VLLM: dict[str, Refusal] = {
    name: refusal
    for name, refusal in (REFUSED_ELSEWHERE | _OWN).items()
    if name not in REFUSED and name not in NO_EFFECT and name != "lora_path"
}


def refuse(unknown: Mapping[str, Any]) -> None:
    """Raise ParameterError for the first of these undeclared fields (by their paths) that isn't served."""
    refuse_unserved({path: value for path, value in unknown.items() if value}, REFUSED)
    refuse_unserved({path: value for path, value in unknown.items() if not _of_sglang(path)}, OF_VLLM)


def unknown_names(given: Mapping[str, Any]) -> list[str]:
    """Those of these undeclared fields that have a value, and are in no table."""
    named = [path for path, value in given.items() if value is not None and not _of_sglang(path)]
    return [path for path in named if path.rpartition(".")[2] not in OF_VLLM]


def _of_sglang(path: str) -> bool:
    return path in REFUSED or path in NO_EFFECT


class SGLangGrammars(BaseModel):
    """Structured outputs: at most one of a regex, a schema as a string, and a grammar in GBNF; "" is none."""

    model_config = ConfigDict(extra="allow")

    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    @property
    def given(self) -> str | None:
        """The field that asks for them. Raises ParameterError for more than one."""
        names = [name for name in ("regex", "json_schema", "ebnf") if getattr(self, name)]
        if len(names) > 1:
            message = f"{' and '.join(names)} each ask for an answer's form: send one."
            raise ParameterError(message, f"sampling_params.{names[1]}")
        return names[0] if names else None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The same under vLLM's names. SGLang has a name for any JSON object."""
        match self.given:
            case "regex":
                return StructuredOutputsParams(regex=self.regex)
            case "ebnf":
                return StructuredOutputsParams(grammar=self.ebnf)
            case "json_schema" if self.json_schema == "$$ANY$$":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                return StructuredOutputsParams(json=self.json_schema)
        return None
