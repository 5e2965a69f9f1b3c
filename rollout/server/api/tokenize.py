"""The model's tokenizer for clients that have none: `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel

from rollout.server.admit import check_vocabulary
from rollout.server.context import ServerDep
from rollout.server.limits import BoundedRoute
from rollout.server.prompts import require_tokenizer, token_ids
from rollout.server.wire.anthropic import CountTokensRequest, CountTokensResponse
from rollout.server.wire.body import ChatFields, Text, TextPrompt, TokenIds

router = APIRouter(route_class=BoundedRoute)


class TokenizeCompletionRequest(BaseModel):
    """Count and list the tokens of a text."""

    model: Text | None = None
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatFields):
    """Count and list the tokens of a chat, as the model would see it."""

    model: Text | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """The text of these ids."""

    model: Text | None = None
    tokens: TokenIds


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
    prompt = body if isinstance(body, TokenizeChatRequest) else TextPrompt(body.prompt, body.add_special_tokens)
    ids = await token_ids(server, prompt)
    answer = TokenizeResponse(count=len(ids), max_model_len=server.model.max_model_len, tokens=ids)
    if body.return_token_strs:
        tokenizer = await require_tokenizer(server)
        answer.token_strs = await asyncio.to_thread(tokenizer.convert_ids_to_tokens, ids)
    return answer


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, server: ServerDep) -> CountTokensResponse:
    """How many tokens a chat of /v1/messages has as a prompt."""
    server.check_model(body.model)
    (prompt,) = body.prompts()
    return CountTokensResponse(input_tokens=len(await token_ids(server, prompt)))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, server: ServerDep) -> DetokenizeResponse:
    """The text of token ids, special tokens included."""
    server.check_model(body.model)
    check_vocabulary(server.model, body.tokens)
    tokenizer = await require_tokenizer(server)
    return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens))
