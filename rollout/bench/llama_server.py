"""llama.cpp's server under the same loads, by its own `/completion` (tools/server/README.md in llama.cpp's sources)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from rollout.bench.loads import Load


class LlamaServer:
    """A client for a round. Tokens are sampled at temperature 1 without filters, and answered with their logprobs."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as requests: those of the trainer's client have no limit either.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, limits=limits)

    async def __aenter__(self) -> LlamaServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, load: Load, prompt: Sequence[int]) -> tuple[list[int], float | None]:
        """How many tokens each choice has, and when the first one came, if the load is streamed.

        Raises ValueError for a load with a schema, and httpx.HTTPError.
        """
        if load.schema is not None:
            raise ValueError(
                f"llama.cpp's server isn't asked for load {load.name!r}: its grammars are another language"
            )
        body = {
            "prompt": list(prompt),
            "n_predict": load.max_tokens,
            "temperature": 1.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "n_probs": 1,
            "return_tokens": True,
            "cache_prompt": False,
            "stream": load.stream,
        } | ({"n_cmpl": load.n} if load.n > 1 else {})
        if not load.stream:
            answer = await self._http.post("/completion", json=body)
            answer.raise_for_status()
            choices: Any = answer.json()
            return [
                choice["tokens_predicted"] for choice in (choices if isinstance(choices, list) else [choices])
            ], None
        counts: list[int] = []
        first = None
        async with self._http.stream("POST", "/completion", json=body) as events:
            events.raise_for_status()
            async for line in events.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter()
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("stop"):  # the last of a choice; a token within a character has no event of its own
                        counts.append(event["tokens_predicted"])
        return counts, first
