"""The paths that generate, one a dialect; each does no more than name its body and its writer."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from fastapi.routing import APIRoute

from rollout.server.admit import admit
from rollout.server.answers.respond import respond
from rollout.server.context import ServerContext, ServerDep
from rollout.server.errors import ApiError
from rollout.server.generation import Generation
from rollout.server.limits import BoundedRoute
from rollout.server.prompts import encode
from rollout.server.wire.answer import B, Writer
from rollout.server.wire.anthropic import MessagesRequest
from rollout.server.wire.chat import ChatCompletionRequest, ChatWriter
from rollout.server.wire.completions import CompletionRequest, CompletionWriter
from rollout.server.wire.messages import MessagesWriter
from rollout.server.wire.sglang import SGLangRequest, SGLangWriter
from rollout.server.wire.tokens import GenerateRequest, GenerateWriter

router = APIRouter(route_class=BoundedRoute)
scale_out_router = APIRouter(route_class=BoundedRoute)


@scale_out_router.post("/inference/v1/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Continue a prompt of token ids; server-sent events with `stream`."""
    return await _answer(GenerateWriter, body, request)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts; server-sent events with `stream`. Choice i·n + j is the j-th of prompt i."""
    return await _answer(CompletionWriter, body, request)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a chat; server-sent events with `stream`."""
    return await _answer(ChatWriter, body, request)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a chat; Anthropic's events with `stream`."""
    return await _answer(MessagesWriter, body, request)


@router.put("/generate", include_in_schema=False)
@router.post("/generate")
async def sglang_generate(body: SGLangRequest, request: Request, server: ServerDep) -> Response:
    """SGLang's: continue token ids or texts; server-sent events with `stream`, each of which repeats what came before.

    Choice i·n + j is the j-th of prompt i.
    """
    if body.return_routed_experts and server.model.routing is None:
        message = "return_routed_experts needs a mixture of experts served with --enable-return-routed-experts."
        raise ApiError(400, message, param="return_routed_experts")
    return await _answer(SGLangWriter, body, request)


async def _answer(dialect: type[Writer[B]], body: B, request: Request) -> Response:
    """Parsed, prepared, answered. Raises ApiError, ParameterError or EngineError."""
    server: ServerContext = request.app.state.server
    if body.model:
        server.check_model(body.model)
    body.check()
    generations: list[Generation] = []
    for prompt in body.prompts():
        if generations:
            await asyncio.sleep(0)  # others' turn: there may be thousands
        encoded = await encode(server, prompt)
        first_index = generations[-1].first_index + generations[-1].n if generations else 0
        generation = await admit(server, body, request.headers, encoded.token_ids, first_index)
        generation.prompt_text = encoded.text
        generations.append(generation)
    response = await respond(request, server, dialect(body, server.config, generations), generations)
    if ignored := body.ignored:
        response.headers.update(server.ignored_header(ignored))
    return response


@scale_out_router.post("/inference/v1/abort_requests")
async def abort_requests(
    server: ServerDep, request_ids: Annotated[list[str] | None, Body(embed=True)] = None
) -> Response:
    """End these requests with finish_reason "abort", in the background. Ids are those that the server returned."""
    if request_ids is None:
        raise ApiError(400, "Missing 'request_ids' in request body", type="Bad Request")
    server.engine.abort(request_ids)
    return Response()


def disabled(router: APIRouter, what: str, flag: str) -> APIRouter:
    """The paths of this router on a server that was started without the flag they need."""
    off = APIRouter()

    async def refuse() -> Response:
        raise ApiError(403, f"{what} are disabled. Restart rollout serve with {flag} to enable them.")

    for route in router.routes:
        assert isinstance(route, APIRoute)
        off.add_api_route(route.path, refuse, methods=[*(route.methods or ())])
    return off
