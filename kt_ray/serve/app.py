"""The HTTP application: routes, streams, errors. Runs under uvicorn by itself or behind Ray Serve."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kt_ray.errors import UserError
from kt_ray.serve.access import Gate
from kt_ray.serve.api_errors import ApiError, of_user_error, of_validation
from kt_ray.serve.completions import CompletionService, Job
from kt_ray.serve.replies import ChatReplies, Choice, CompletionReplies
from kt_ray.serve.schemas import ChatRequest, CompletionRequest


def make_app(service: CompletionService) -> FastAPI:
    """The application of one service."""
    served = service.served
    app = FastAPI(title="kt_ray", docs_url=None, redoc_url=None)
    app.add_middleware(Gate, key=served.key, max_body=served.max_body)
    _add_errors(app)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(
            {"status": "ok" if service.healthy else "stopped"}, 200 if service.healthy else 503
        )

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.adapter_of(name)
        return JSONResponse(_model(service, name))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        service.adapter_of(body.model)
        service.check_room(body.n or 1)
        prompt = await service.chat_prompt(body.messages)
        replies = ChatReplies(
            service.encoder.tokenizer,
            secrets.token_hex(12),
            body.model,
            served.fingerprint,
            len(prompt),
            bool(body.logprobs),
        )
        return await _respond(service, body, [prompt], replies, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.adapter_of(body.model)
        service.check_room(len(body.prompts) * (body.n or 1))
        prompts = [await service.completion_prompt(prompt) for prompt in body.prompts]
        replies = CompletionReplies(
            service.encoder.tokenizer,
            secrets.token_hex(12),
            body.model,
            served.fingerprint,
            sum(map(len, prompts)),
            body.logprobs is not None,
        )
        if body.echo:
            texts = [
                p if isinstance(p, str) else str(service.encoder.tokenizer.decode(p)) for p in body.prompts
            ]
            replies.echoes = [text for text in texts for _ in range(body.n or 1)]
        return await _respond(service, body, prompts, replies, request)

    return app


def _model(service: CompletionService, name: str) -> dict[str, Any]:
    served = service.served
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "kt_ray",
        "max_model_len": served.context,
    }
    return card if name == served.name else {**card, "parent": served.name}


async def _respond(
    service: CompletionService,
    body: ChatRequest | CompletionRequest,
    prompts: list[tuple[int, ...]],
    replies: ChatReplies | CompletionReplies,
    request: Request,
) -> Response:
    job = service.start(service.requests(body, prompts))
    choices = [Choice(service.served.eos) for _ in job.answers]
    if body.stream:
        return EventStream(_chunks(job, choices, replies, body.include_usage), job)
    work = asyncio.ensure_future(_collect(job, choices))
    disconnect = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        await work
    finally:
        job.cancel()  # before anything is awaited: this task may be cancelled itself, and twice
        await _end(work, disconnect)
    return JSONResponse(replies.whole(choices))


async def _collect(job: Job, choices: list[Choice]) -> None:
    async for index, piece in job.pieces():
        choices[index].add(piece)


async def _chunks(
    job: Job, choices: list[Choice], replies: ChatReplies | CompletionReplies, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    extra: dict[str, Any] = {"usage": None} if usage else {}
    for index in range(len(choices)):
        opening = replies.opening(index)
        if opening is not None:
            yield {**opening, **extra}
    async for index, piece in job.pieces():
        for chunk in replies.chunks(index, choices[index].add(piece)):
            yield {**chunk, **extra}
    if usage:
        yield replies.usage_chunk(choices)


class EventStream(Response):
    """Server-sent events, until the end or until the client leaves, which cancels the job."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], job: Job) -> None:
        self._chunks = chunks
        self._job = job
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        # A body of unknown length.
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = asyncio.ensure_future(self._write(send))
        disconnect = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and not isinstance(writer.exception(), OSError):
                await writer  # OSError: the client left between two chunks
        finally:
            self._job.cancel()
            await _end(writer, disconnect)

    async def _write(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send(_event(json.dumps(chunk, ensure_ascii=False)))
            await send(_event("[DONE]"))
        except ApiError as error:  # too late for a status
            await send(_event(json.dumps(error.body, ensure_ascii=False)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _disconnected(receive: Callable[[], Any]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _add_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(ApiError)
    async def api(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> Response:
        return answer(of_user_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(of_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        what = {404: "unknown request URL", 405: "this method is not allowed here"}
        message = f"{what.get(error.status_code, error.detail)}: {request.method} {request.url.path}"
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        return answer(ApiError(error.status_code, message, code=code, headers=error.headers))

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, "the server failed at this request; its log says why"))
