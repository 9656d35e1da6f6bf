"""The HTTP application: routes, streams, errors. Runs under uvicorn by itself or behind Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kt_ray.errors import UserError
from kt_ray.serve.access import Gate
from kt_ray.serve.api_errors import ApiError, of_user_error, of_validation
from kt_ray.serve.completions import CompletionService, Job, Room
from kt_ray.serve.replies import ChatReplies, Choice, CompletionReplies, Replies
from kt_ray.serve.schemas import ChatRequest, CompletionRequest

# What ends a line to many clients (str.splitlines, httpx's iter_lines), though not to server-sent events.
_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}

BodyT = TypeVar("BodyT", ChatRequest, CompletionRequest)


def make_app(service: CompletionService) -> FastAPI:
    """The application of one service."""
    served = service.served
    app = FastAPI(title="kt_ray", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, key=served.key, max_body=served.max_body)
    add_errors(app)

    @app.get("/health")
    async def health() -> Response:
        found = service.health
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.models]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.adapter_of(name)
        return JSONResponse(_model(service, name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        with Room(service) as room:
            body = await _body(service, request, ChatRequest)
            service.adapter_of(body.model)
            room.take(body.n)
            prompts = [await service.work(service.chat_prompt, body.messages, body.reasoning_effort)]
            job = service.start(service.requests(body, prompts), room)
        return await _respond(service, body, job, ChatReplies(service, body, prompts), request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        with Room(service) as room:
            body = await _body(service, request, CompletionRequest)
            service.adapter_of(body.model)
            room.take(len(body.prompts) * body.n)
            prompts = [await service.work(service.completion_prompt, prompt) for prompt in body.prompts]
            job = service.start(service.requests(body, prompts), room)
        return await _respond(service, body, job, CompletionReplies(service, body, prompts), request)

    return app


async def _body(service: CompletionService, request: Request, kind: type[BodyT]) -> BodyT:
    """The request's body, checked.

    Raises:
        ApiError: it is too large or too slow, or no JSON by what it says of itself. ValidationError:
            it is not what `kind` wants. ClientDisconnect.
    """
    return await service.work(kind.model_validate_json, await json_body(request))


def media_type(request: Request) -> str:
    """What a body says that it is."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_body(request: Request) -> bytes:
    """The request's body. Raises ApiError where it is no JSON by what it says of itself."""
    # A web page can send what claims to be text anywhere, without its reader being asked first.
    if media_type(request) != "application/json":
        raise ApiError(400, "the body must be a JSON object, sent as application/json")
    return await request.body()


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
    job: Job,
    replies: Replies,
    request: Request,
) -> Response:
    choices = [Choice(service.served.eos) for _ in job.answers]
    if body.stream:
        return EventStream(_events(_chunks(job, choices, replies, body.include_usage)), job)
    if not await _unless_left(_collect(job, choices), request.receive, job):
        return Response(status_code=499)  # nobody reads it
    return JSONResponse(replies.whole(choices))


async def _collect(job: Job, choices: list[Choice]) -> None:
    async for index, piece in job.pieces():
        choices[index].add(piece)


async def _chunks(
    job: Job, choices: list[Choice], replies: Replies, usage: bool
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


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        async for chunk in chunks:
            yield _event(json.dumps(chunk, ensure_ascii=False))
        yield _event("[DONE]")
    except ApiError as error:  # too late for a status
        yield _event(json.dumps(error.body, ensure_ascii=False))


def _event(data: str) -> str:
    return f"data: {data.translate(_LINE_ENDS)}\n\n"


class EventStream(StreamingResponse):
    """Events until the end or until the client leaves, which cancels the job."""

    def __init__(self, events: AsyncIterator[str], job: Job) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(OSError):  # the client left between two chunks
            await _unless_left(self.stream_response(send), receive, self._job)


async def _unless_left(work: Coroutine[Any, Any, None], receive: Receive, job: Job) -> bool:
    """Whether work on a job came to its end before the client left; the job is cancelled in any case."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            return False
        await tasks[0]
        return True
    finally:
        job.cancel()  # before anything is awaited: this task may be cancelled itself, and twice
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def add_errors(app: FastAPI) -> None:
    """Answer every error as `ApiError`."""

    @app.exception_handler(ApiError)
    async def api(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> Response:
        return of_user_error(error).response()

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: ValidationError) -> Response:
        return of_validation(error.errors(include_url=False, include_input=False)).response()

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        what = {404: "unknown request URL", 405: "this method is not allowed here"}
        message = f"{what.get(error.status_code, error.detail)}: {request.method} {request.url.path}"
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed at this request; its log says why").response()
