"""What becomes of the fields of a body that its dialect doesn't declare: refused, without effect, or unknown.

A dialect declares what it serves. Of the rest, what would change the answer is refused by name (`REFUSED`), whatever
the dialect; what changes nothing here is let pass (`NO_EFFECT`); a name that is in neither table is told in a header.
Names are vLLM's, OpenAI's, Anthropic's and SGLang's; tests hold the tables against vLLM's own request models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollout.sampling.params import ParameterError


class Refusal(NamedTuple):
    """Why a field isn't served, and the values that ask for nothing and pass."""

    why: str
    harmless: tuple[Any, ...] = ()


_GRAMMAR = "send structured_outputs"
_LORA = "send the adapter's name as `model`"
_PROCESSOR = "no code of a client's runs in the sampler"
_TRANSFER = "this server runs a model whole, and transfers no cache"
_MEDIA = "only text is served"
_BEAMS = "there is no beam search: every choice is sampled"
_TOOLS = "a model calls as many tools as it will: send tool_choice"

REFUSED: dict[str, Refusal] = {
    "adapter_id": Refusal(_LORA),
    "audio": Refusal(_MEDIA),
    "best_of": Refusal(_BEAMS, (1,)),
    "container": Refusal("this server runs no tools"),
    "content_parts": Refusal(_MEDIA),
    "context_management": Refusal("the server edits no context: send what the model shall see", ({},)),
    "custom_logit_processor": Refusal(_PROCESSOR),
    "custom_params": Refusal(_PROCESSOR, ({},)),
    "ebnf": Refusal(_GRAMMAR),
    "ec_transfer_params": Refusal(_TRANSFER),
    "extra_args": Refusal(_PROCESSOR, ({},)),
    "features": Refusal(_MEDIA),
    "function_call": Refusal(_TOOLS, ("auto", "none")),
    "functions": Refusal("send `tools`", ([],)),
    "guided_choice": Refusal(_GRAMMAR),
    "guided_grammar": Refusal(_GRAMMAR),
    "guided_json": Refusal(_GRAMMAR),
    "guided_regex": Refusal(_GRAMMAR),
    "guided_whitespace_pattern": Refusal(_GRAMMAR),
    "include_reasoning": Refusal("reasoning is part of the answer", (True,)),
    "json_schema": Refusal(_GRAMMAR),
    "kv_transfer_params": Refusal(_TRANSFER),
    "logits_processors": Refusal(_PROCESSOR, ([],)),
    "lora_path": Refusal(_LORA),
    "lora_request": Refusal(_LORA),
    "mcp_servers": Refusal("this server runs no tools", ([],)),
    "media_io_kwargs": Refusal(_MEDIA, ({},)),
    "mm_processor_kwargs": Refusal(_MEDIA, ({},)),
    "modalities": Refusal(_MEDIA, (["text"],)),
    "output_config": Refusal("send response_format, or structured_outputs", ({},)),
    "parallel_tool_calls": Refusal(_TOOLS, (True,)),
    "prompt_embeds": Refusal("a prompt is a text or token ids"),
    "prompt_logprob_start": Refusal("send prompt_logprobs, which begin with the prompt"),
    "prompt_logprob_token_ids": Refusal("send prompt_logprobs, which rank candidates"),
    "regex": Refusal(_GRAMMAR),
    "repetition_detection": Refusal("nothing ends a choice that repeats itself: send stop, or a repetition_penalty"),
    "response_format": Refusal(_GRAMMAR, ({"type": "text"},)),
    "return_hidden_states": Refusal("hidden states don't leave the engine", (False,)),
    "routed_experts_prompt_start": Refusal("send it within sampling_params", (0,)),
    "stop_regex": Refusal("stop strings are plain: send stop"),
    "structural_tag": Refusal(_GRAMMAR),
    "structured_outputs": Refusal("send it within sampling_params"),
    "suffix": Refusal("models are asked to continue, not to fill in", ("",)),
    "thinking": Refusal(
        "how much a model thinks is its template's: send chat_template_kwargs", ({"type": "adaptive"},)
    ),
    "thinking_token_budget": Refusal("thinking isn't counted: send max_tokens", (-1,)),
    "trace_decode_token_ids": Refusal("tokens are sampled: to score given ones, send them as the prompt"),
    "truncate_prompt_tokens": Refusal("prompts are taken as they are: cut them before they are sent"),
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "verbosity": Refusal("models have no such setting: send chat_template_kwargs"),
    "watermarking": Refusal("nothing is watermarked", (False,)),
    "web_search_options": Refusal("this server runs no tools"),
}

_CALLER = "tells who asks, or what for"
_ELSEWHERE = "says something within another server only"
_MEDIA_FORM = "the form of media, which aren't served"

NO_EFFECT: dict[str, str] = {
    "betas": _CALLER,
    "early_stopping": "of beam search, which is refused",
    "flat_logprobs": _ELSEWHERE,
    "guided_decoding_backend": "of grammars, which have one library here",
    "inference_geo": _CALLER,
    "length_penalty": "of beam search, which is refused",
    "metadata": _CALLER,
    "mm_payload": _MEDIA_FORM,
    "output_kind": _ELSEWHERE,
    "output_text_buffer_length": _ELSEWHERE,
    "parse_context": "for output_mode 'derender', which isn't served",
    "prediction": "makes other servers faster",
    "prompt_cache_key": "prefixes are found by themselves",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "reasoning_ended": "of token-in/token-out: the prompt says it elsewhere",
    "reasoning_parser_kwargs": "of parsers: what a prompt ends with says whether its answer has begun to reason",
    "return_mm_kwargs": _MEDIA_FORM,
    "safety_identifier": _CALLER,
    "service_tier": "there is one tier",
    "skip_clone": _ELSEWHERE,
    "skip_reading_prefix_cache": "a cached prefix changes no answer",
    "store": "no answer is kept",
    "stream_interval": "each event of a stream brings what there is by then",
    "token_offsets": "what render says of the prompt's text",
    "truncation_side": "of truncate_prompt_tokens, which is refused",
    "user": _CALLER,
}


def refuse_unserved(extra: Mapping[str, Any], refused: Mapping[str, Refusal] = REFUSED) -> None:
    """Raise ParameterError for the first of these undeclared fields that asks for what isn't served.

    Names may be paths: where the table has no `sampling_params.regex`, the last part counts.
    """
    for path, value in extra.items():
        refusal = refused.get(path) or refused.get(path.rpartition(".")[2])
        if value is not None and refusal is not None and value not in refusal.harmless:
            raise ParameterError(f"{path} is not supported by this server: {refusal.why}; leave it out.", path)


def is_unknown(path: str) -> bool:
    """Whether the field of this name or path is in neither table."""
    name = path.rpartition(".")[2]
    return name not in REFUSED and name not in NO_EFFECT
