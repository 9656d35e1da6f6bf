"""The HTTP application: the paths that the SDK's clients call. Runs under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError, SchemaValidator, from_json
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kt_ray.serve.access import Gate
from kt_ray.serve.api_errors import ApiError, of_validation
from kt_ray.serve.app import add_errors, json_body, media_type
from kt_ray.serve.schemas import MAX_FIELDS
from kt_ray.train_server.futures import Failure, Promise
from kt_ray.train_server.sample_rounds import failure_of
from kt_ray.train_server.saved_models import SAMPLER, TRAINING, Run, Saved, checkpoint_path, expiry
from kt_ray.train_server.service import TrainService
from kt_ray.train_server.wire import PROTOBUF, bad, pass_request, types

LONG_POLL = 30.0  # seconds; the SDK gives up after 45
MOST_LISTED = 1000
_CHUNK_BYTES = 5_000_000  # of the part of a batch that the SDK sends at once
# paths that are known and refused: what they would do
REFUSED = {
    "auth/token": "exchanging a key for a token",
    "create_custom_loss": "a custom loss on the server (forward_backward_custom runs it in the client)",
    "save_weights_external": "external weights (save_weights_for_sampler writes the same PEFT adapter)",
    "copy_weights": "copying weights",
    "join_sampling_session": "joining a sampling session",
    "retrieve_futures": "fetching several results at once",
    "sessions/search": "searching sessions",
}

KindT = TypeVar("KindT", bound=BaseModel)


class WeightsPath(BaseModel):
    tinker_path: str


class RequestName(BaseModel):
    request_id: str


class Expiry(BaseModel):
    ttl_seconds: int | None = None


def api_keys(headers: Headers) -> tuple[str, ...]:
    """The SDK sends keys that begin with "tml-" only: that may be a part of the server's key, or not."""
    key = headers.get("x-api-key", "").strip(" \t")
    return (key, key.removeprefix("tml-")) if key else ()


def make_app(service: TrainService, key: bytes | None, max_body: int) -> FastAPI:
    """The application of one service.

    Args:
        key, max_body: see Gate. A client sends its key as X-API-Key.
    """
    app = FastAPI(title="kt_ray", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        Gate,
        key=key,
        max_body=max_body,
        open_paths=("/api/v1/healthz",),
        keys_of=api_keys,
        header="X-API-Key: <key>",
    )
    add_errors(app)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors()).response()

    @app.exception_handler(OSError)
    async def disk(request: Request, error: OSError) -> Response:
        return ApiError(500, failure_of(error).message).response()

    _add_sessions(app, service, max_body)
    _add_training(app, service)
    _add_sampling(app, service)
    _add_records(app, service)
    for path, what in REFUSED.items():
        app.add_api_route(f"/api/v1/{path}", _refusal(what), methods=["POST"])
    return app


def _refusal(what: str) -> Any:
    async def refuse() -> Response:
        raise ApiError(400, f"{what} is not supported by this server", code="not_supported")

    return refuse


@cache
def validator(kind: type[BaseModel]) -> SchemaValidator:
    """Of the SDK's type, but the first wrong entry refuses a list: the errors of all would fill memory. And
    fields that it would pass over, as SamplingParams does, are refused."""
    schema = _stricter(kind.__pydantic_core_schema__)
    try:
        # Prebuilt are the types within it, which are as the SDK has them.
        return SchemaValidator(schema, _use_prebuilt=False)
    except TypeError:  # an older pydantic, which has none
        return SchemaValidator(schema)


def _stricter(schema: Any) -> Any:
    """A copy."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_stricter, schema))
    if not isinstance(schema, dict):
        return schema
    made = {key: _stricter(value) for key, value in schema.items()}
    if made.get("extra_fields_behavior") == "ignore":
        made["extra_fields_behavior"] = "forbid"
    if made.get("type") in ("list", "set", "frozenset", "tuple", "dict"):
        made["fail_fast"] = True
    return made


async def _body(request: Request, kind: type[KindT]) -> KindT:
    """The request's body, checked.

    Raises:
        ApiError: it is no JSON by what it says of itself. ValidationError: it is not what `kind` wants.
    """
    return await asyncio.to_thread(_validated, kind, await json_body(request))


def _validated(kind: type[KindT], body: bytes) -> KindT:
    fields = None
    with contextlib.suppress(ValueError):  # no JSON, as the validator will say
        fields = from_json(body)
    if text := _too_many(fields):
        fault = PydanticCustomError("too_many_fields", "{text}", {"param": None, "text": text})
        raise ValidationError.from_exception_data(kind.__name__, [{"type": fault, "loc": (), "input": None}])
    made: KindT = validator(kind).validate_json(body)
    return made


def _too_many(fields: Any) -> str:
    """What is said of an object with more than MAX_FIELDS fields, each unknown one of which would be an error
    of its own; "" = there is none."""
    where, nested = "the body", (dict, list)
    left = [fields]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                return f"{where} has {len(value)} fields, more than {MAX_FIELDS}"
            # A client's notes may hold any.
            inner = [one for name, one in value.items() if value is not fields or name != "user_metadata"]
        else:
            inner = value if isinstance(value, list) else []
        left.extend(one for one in inner if isinstance(one, nested))
        where = "an object of the body"
    return ""


async def _numbered_body(service: TrainService, request: Request, kind: type[KindT]) -> KindT:
    """The body of one of a model's requests, which are numbered: one that is wrong holds its place, too.

    Raises:
        ApiError, ValidationError: as `_body`.
    """
    try:
        return await _body(request, kind)
    except ValidationError as error:
        fields = None
        with contextlib.suppress(ValueError, RecursionError):
            fields = json.loads(await request.body())
            if isinstance(fields, dict):
                load = kind is types.LoadWeightsRequest
                service.refuse(fields.get("model_id"), fields.get("seq_id"), load=load)
        for fault in error.errors(include_url=False, include_input=False):
            value = fields
            for part in fault["loc"]:  # with the names of a union's branches, which are no fields
                value = value.get(part, value) if isinstance(value, dict) else value
            if fault["type"] == "float_type" and value is None:
                null = str(fault["loc"][-1])
                message = (
                    f"{null} is null, which the SDK sends for NaN and infinity; required a finite number"
                )
                raise bad(message, null) from None
        raise


def _promised(promise: Promise, **more: Any) -> Response:
    return JSONResponse({"request_id": promise.name, **more})


def _add_sessions(app: FastAPI, service: TrainService, max_body: int) -> None:
    backend = service.backend

    @app.get("/api/v1/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    @app.post("/api/v1/client/config")
    async def config() -> Response:
        # all else as the SDK has it: no token exchange, no compression, no server-side losses
        chunk = max(1, min(_CHUNK_BYTES, max_body // 2))
        return JSONResponse({"fwdbwd_max_chunk_bytes_count": chunk})

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> Response:
        model = {
            "model_name": backend.base_model,
            "max_context_length": backend.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    @app.post("/api/v1/telemetry")
    async def telemetry() -> Response:
        return JSONResponse({"status": "accepted"})

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> Response:
        return JSONResponse(service.create_session(await _body(request, types.CreateSessionRequest)))

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        service.hear((await _body(request, types.SessionHeartbeatRequest)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    @app.get("/api/v1/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> Response:
        names = [session.name for session in service.sessions()]
        return JSONResponse({"sessions": _page(names, limit, offset)})

    @app.get("/api/v1/sessions/{name}")
    async def session(name: str) -> Response:
        found = next((one for one in service.sessions() if one.name == name), None)
        if found is None:
            raise ApiError(404, f"there is no session '{name[:100]}', or no longer", code="session_not_found")
        return JSONResponse(
            {
                "training_run_ids": found.models,
                "sampler_ids": found.samplers,
                "user_metadata": _texts(found.user_metadata),
                "display_name": found.display_name,
            }
        )

    @app.post("/api/v1/sessions/{name}/finish")
    async def finish(name: str) -> Response:
        service.finish(name)
        return Response(status_code=204)


def _add_training(app: FastAPI, service: TrainService) -> None:
    body_of = partial(_numbered_body, service)

    @app.post("/api/v1/create_model")
    async def create_model(request: Request) -> Response:
        return _promised(service.create_model(await _body(request, types.CreateModelRequest)))

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> Response:
        model = service.model((await _body(request, types.GetInfoRequest)).model_id)
        backend = service.backend
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.name,
                "model_name": backend.base_model,
                **model.run.lora_card,
                "model_data": {"model_name": backend.base_model, "tokenizer_id": backend.tokenizer},
            }
        )

    @app.post("/api/v1/unload_model")
    async def unload_model(request: Request) -> Response:
        return _promised(service.unload_model((await _body(request, types.UnloadModelRequest)).model_id))

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> Response:
        if media_type(request) != PROTOBUF:
            raise bad(f"the body must be the protobuf message ForwardBackwardRequest, sent as {PROTOBUF}")
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise bad("a compressed body is not supported by this server; send it as it is")
        body = await request.body()
        message = await asyncio.to_thread(pass_request, body)
        return _promised(await asyncio.to_thread(service.forward_backward, message))

    @app.post("/api/v1/optim_step")
    async def optim_step(request: Request) -> Response:
        return _promised(service.optim_step(await body_of(request, types.OptimStepRequest)))

    @app.post("/api/v1/save_weights")
    async def save_weights(request: Request) -> Response:
        return _promised(service.save_weights(await body_of(request, types.SaveWeightsRequest)))

    @app.post("/api/v1/load_weights")
    async def load_weights(request: Request) -> Response:
        return _promised(service.load_weights(await body_of(request, types.LoadWeightsRequest)))

    @app.post("/api/v1/save_weights_for_sampler")
    async def save_for_sampler(request: Request) -> Response:
        body = await body_of(request, types.SaveWeightsForSamplerRequest)
        return _promised(service.save_weights_for_sampler(body))

    @app.post("/api/v1/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        promise = service.promise((await _body(request, types.FutureRetrieveRequest)).request_id)
        outcome = await promise.wait(LONG_POLL)
        if outcome is None:  # 408: the SDK asks again at once
            state = "paused_capacity" if promise.paused else "active"
            again = {"type": "try_again", "request_id": promise.name, "queue_state": state}
            if promise.paused:  # which the SDK shows
                again["queue_state_reason"] = promise.paused
            return JSONResponse(again, 408)
        service.promises.fetched(promise)
        if isinstance(outcome, Failure):
            return JSONResponse({"error": outcome.message, "category": outcome.category})
        return Response(outcome.body, media_type=outcome.media)

    @app.post("/api/v1/cancel_future")
    async def cancel_future(request: Request) -> Response:
        service.cancel((await _body(request, RequestName)).request_id)
        return Response(status_code=204)


def _add_sampling(app: FastAPI, service: TrainService) -> None:
    @app.post("/api/v1/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        name = service.create_sampler(await _body(request, types.CreateSamplingSessionRequest))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    @app.post("/api/v1/asample")
    async def asample(request: Request) -> Response:
        promise, count = service.sample(await _body(request, types.SampleRequest))
        return _promised(promise, sample_sequence_ids=[f"{promise.name}:{i}" for i in range(count)])

    @app.get("/api/v1/samplers/{name}")
    async def sampler(name: str) -> Response:
        found = service.sampler(name)
        return JSONResponse(
            {"sampler_id": found.name, "base_model": service.backend.base_model, "model_path": found.path}
        )


def _add_records(app: FastAPI, service: TrainService) -> None:
    saved = service.saved

    def found(run: str, kind: str, name: str) -> Saved:
        return saved.find(checkpoint_path(run, kind, name))

    def all_runs() -> dict[str, Run]:
        runs = {model.name: model.run for model in service.models()}
        return {**{run.run: run for run in saved.runs()}, **runs}

    def card(run: Run) -> dict[str, Any]:
        checkpoints = saved.all(run.run)
        live = next((model for model in service.models() if model.name == run.run), None)
        last = {
            kind: next((one.card for one in checkpoints if one.kind == kind), None)
            for kind in (TRAINING, SAMPLER)
        }
        heard = live.heard.isoformat() if live else max([run.created, *(one.created for one in checkpoints)])
        return {
            "training_run_id": run.run,
            **run.lora_card,
            "model_owner": "kt_ray",
            "last_request_time": heard,
            "last_checkpoint": last[TRAINING],
            "last_sampler_checkpoint": last[SAMPLER],
            "user_metadata": _texts(run.user_metadata),
        }

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> Response:
        one = saved.find((await _body(request, WeightsPath)).tinker_path)
        return JSONResponse(one.lora_card)

    @app.get("/api/v1/training_runs")
    def training_runs(limit: int = 20, offset: int = 0) -> Response:
        runs = sorted(all_runs().values(), key=lambda run: run.created, reverse=True)
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        listed = [card(run) for run in _page(runs, limit, offset)]
        return JSONResponse({"training_runs": listed, "cursor": cursor})

    @app.get("/api/v1/training_runs/{run}")
    def training_run(run: str) -> Response:
        return JSONResponse(card(known_run(run)))

    def known_run(name: str) -> Run:
        run = all_runs().get(name)
        if run is None:
            raise ApiError(404, f"there is no training run '{name[:100]}'", code="run_not_found")
        return run

    @app.get("/api/v1/training_runs/{run}/checkpoints")
    def checkpoints_of(run: str) -> Response:
        return JSONResponse({"checkpoints": [one.card for one in saved.all(known_run(run).run)]})

    @app.get("/api/v1/checkpoints")
    def checkpoints(limit: int = 100, offset: int = 0) -> Response:
        every = saved.all()
        cursor = {"offset": offset, "limit": limit, "total_count": len(every)}
        return JSONResponse(
            {"checkpoints": [one.card for one in _page(every, limit, offset)], "cursor": cursor}
        )

    checkpoint = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"

    @app.delete(checkpoint)
    def delete(run: str, kind: str, name: str) -> Response:
        saved.delete(found(run, kind, name))
        return Response(status_code=204)

    @app.put(f"{checkpoint}/ttl")
    async def ttl(request: Request, run: str, kind: str, name: str) -> Response:
        seconds = (await _body(request, Expiry)).ttl_seconds
        saved.set_expiry(found(run, kind, name).path, expiry(seconds))
        return Response(status_code=204)

    @app.post(f"{checkpoint}/publish")
    @app.delete(f"{checkpoint}/publish")
    async def publish(run: str, kind: str, name: str) -> Response:
        raise ApiError(400, "publishing checkpoints is not supported by this server", code="not_supported")

    @app.get(f"{checkpoint}/archive")
    def archive(run: str, kind: str, name: str) -> Response:
        one = found(run, kind, name)
        if one.kind != SAMPLER:
            raise bad("an archive is made of a sampler's weights only: save_weights_for_sampler writes them")
        # where its adapter had room: what /tmp takes may be the memory of the experts
        file = tempfile.TemporaryFile(dir=saved.root)  # noqa: SIM115 - closed when it has been sent
        try:
            saved.archive(one, file)
        except BaseException:
            file.close()
            raise
        file.seek(0)
        named = {"content-disposition": f'attachment; filename="{one.name.replace(":", "_")}.tar.gz"'}
        blocks = iter(lambda: file.read(1 << 20), b"")
        return StreamingResponse(
            blocks, media_type="application/gzip", headers=named, background=BackgroundTask(file.close)
        )


def _texts(notes: dict[str, Any] | None) -> dict[str, str] | None:
    """A client's notes as the SDK's records have them: texts, though it sends any JSON."""
    if notes is None:
        return None
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in notes.items()
    }


ItemT = TypeVar("ItemT")


def _page(items: Sequence[ItemT], limit: int, offset: int) -> Sequence[ItemT]:
    if not (0 <= limit <= MOST_LISTED and offset >= 0):
        raise bad(f"limit must be 0 to {MOST_LISTED} and offset at least 0")
    return items[offset : offset + limit]
