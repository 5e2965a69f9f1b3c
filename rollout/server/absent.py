"""Paths that a vLLM server has and this one hasn't, and what to use instead: said in place of a bare 404."""

from __future__ import annotations

_POOLING = "models generate here: none embeds, classifies or scores"
_TEXT = "models take and give text alone"
_SCORE = "ask /v1/completions with logprobs and logprob_token_ids for how likely each label is"
_CHAT = "use /v1/chat/completions, with the whole dialogue in messages"
_RESTARTS = "engines that die are restarted (--engine-restarts); /metrics counts them"
_PROFILE = "measure with `rollout bench`, or run a profiler on the engine's process"

ABSENT: dict[str, str] = {
    "/classify": _POOLING,
    "/cohere/v2/chat": _CHAT,
    "/cohere/v2/chat/render": "use /v1/chat/completions/render",
    "/fault_tolerance/apply": _RESTARTS,
    "/fault_tolerance/status": _RESTARTS,
    "/generative_scoring": _SCORE,
    "/invocations": "call the path that the body is for",
    "/is_scaling_elastic_ep": "/scale_elastic_ep answers once it is done",
    "/kv_event_sources": "no events of the cache are published; X-Session-ID keeps a dialogue at its engine",
    "/load": "/metrics has what runs (vllm:num_requests_running) and what waits (vllm:num_requests_waiting)",
    "/pooling": _POOLING,
    "/ready": "use /health",
    "/readyz": "use /health",
    "/release_kv_cache_memory": "use /sleep (--enable-sleep-mode)",
    "/rerank": _POOLING,
    "/reset_encoder_cache": _TEXT,
    "/reset_mm_cache": _TEXT,
    "/score": _POOLING,
    "/skyrl/v1/generate": "use /inference/v1/generate, which tells routed experts as base64 of an array",
    "/start_draft_weight_update": "no draft model speculates here: use /start_weight_update",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/tokenizer_info": "read it from the model's folder, which /v1/models names",
    "/v1/audio/transcriptions": _TEXT,
    "/v1/audio/translations": _TEXT,
    "/v1/chat/completions/batch": "send one request a dialogue: they run in one batch all the same",
    "/v1/decisions": _SCORE,
    "/v1/embeddings": _POOLING,
    "/v1/messages/render": "use /v1/chat/completions/render",
    "/v1/realtime": _TEXT,
    "/v1/rerank": _POOLING,
    "/v1/responses": _CHAT,
    "/v1/responses/{response_id}": "no answer is kept",
    "/v1/responses/{response_id}/cancel": "no answer is kept: close the connection, or use /abort_requests",
    "/v1/responses/render": "use /v1/chat/completions/render",
    "/v1/score": _POOLING,
    "/v1/systemone": _SCORE,
    "/v2/embed": _POOLING,
    "/v2/rerank": _POOLING,
}


def why_absent(path: str) -> str | None:
    """What to tell whoever asks for this path of another server; None for a path that none has."""
    why = ABSENT.get(path)
    if why is None and path.startswith("/v1/responses/"):
        why = ABSENT["/v1/responses/{response_id}" + ("/cancel" if path.endswith("/cancel") else "")]
    return None if why is None else f"{path} isn't offered by this server: {why}."
