"""How far one request goes through the server's half of the source before it is answered.

Before dialects had one writer each, and the facts of the model were held once, it was 72 moves and 145 calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from rollout.config import EngineConfig, ServerConfig
from rollout.fleet.fleet import Fleet
from rollout.server.app import create_app
from tests.support import fake_engine
from tests.support.trace import Trace, traced

MOVES, CALLS = 73, 162
TOKENS = 3


def test_a_request_of_three_tokens_takes_few_calls_in_few_files(tmp_path: Path) -> None:
    async def serve() -> Trace:
        config = EngineConfig(model=str(tmp_path))
        fleet = Fleet(config, target=fake_engine.run_engine)
        fleet.start()
        try:
            await fleet.wait_ready(120)
            app = create_app(fleet, config, ServerConfig(enable_scale_out=True, return_sampling_mask=True))
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                body = {"token_ids": [fake_engine.SLOW, 20], "sampling_params": {"max_tokens": TOKENS}}
                await client.post("/inference/v1/generate", json=body)  # what is made once is made
                with traced() as trace:
                    answer = await client.post("/inference/v1/generate", json=body)
                assert len(answer.json()["choices"][0]["token_ids"]) == TOKENS
                return trace
        finally:
            await fleet.stop()

    trace = asyncio.run(serve())
    assert len(trace.calls_between_files) <= MOVES, trace.calls_between_files
    assert 50 < len(trace.calls) <= CALLS, trace.calls
