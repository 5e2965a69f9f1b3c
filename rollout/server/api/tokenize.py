"""The model's tokenizer for clients that have none: `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from rollout.server.context import ServerDep, require_json
from rollout.server.prompts import encode, render_chat, require_tokenizer
from rollout.server.wire.errors import ApiError
from rollout.server.wire.openai_requests import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest

router = APIRouter(dependencies=[Depends(require_json)])


class TokenizeResponse(BaseModel):
    """The ids, and where asked for the tokenizer's own names of them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeCompletionRequest | TokenizeChatRequest, server: ServerDep) -> TokenizeResponse:
    """The token ids of a text or of a chat."""
    server.check_model(body.model)
    if isinstance(body, TokenizeChatRequest):
        ids = await render_chat(server, body)
    else:
        ids = await encode(server, body.prompt, add_special_tokens=body.add_special_tokens)
    answer = TokenizeResponse(count=len(ids), max_model_len=server.engine.info.max_model_len, tokens=ids)
    if body.return_token_strs:
        tokenizer = await require_tokenizer(server)
        answer.token_strs = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, ids)
    return answer


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: ServerDep) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    server.check_model(body.model)
    check_vocabulary(server, body.tokens)
    tokenizer = await require_tokenizer(server)
    return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens))


def check_vocabulary(server: ServerDep, token_ids: list[int]) -> None:
    """Raise a 400 for an id that the model doesn't have."""
    largest = max(token_ids, default=0)
    if largest >= server.engine.info.vocab_size:
        raise ApiError(400, f"Token id {largest} is out of vocabulary")
