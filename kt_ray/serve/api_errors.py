"""Errors in the format of OpenAI's API: an HTTP code and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from kt_ray.errors import UserError


class ApiError(Exception):
    """An answer that is an error.

    Args:
        param: the field of the request that is at fault.
        code: for programs, as in OpenAI's API ("model_not_found", "context_length_exceeded", ...).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def of_user_error(error: UserError) -> ApiError:
    """A request that the engine refuses."""
    return ApiError(400, error.line())


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def what_stopped(error: BaseException) -> str:
    """For clients: what happened, and no more; addresses and processes are the operator's."""
    return error.what if isinstance(error, UserError) else "a fault in it"


def engine_stopped(error: BaseException) -> ApiError:
    """Of a request that runs, or comes, while generation has stopped: it is brought back if it can be."""
    message = f"generation has stopped: {what_stopped(error)}"
    return ApiError(503, message, code="engine_stopped", headers={"retry-after": "5"})


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The first fault that pydantic found in a request's body."""
    first = errors[0]
    if str(first.get("type")).endswith("_type"):
        # Of a union, such as text or list of texts, the branch of another type fails first: not the cause.
        same = (e for e in errors if e["loc"][:1] == first["loc"][:1] and not e["type"].endswith("_type"))
        first = next(same, first)
    kind, context = str(first.get("type")), first.get("ctx") or {}
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', first['msg'])}")
    if "param" in context:  # a check of our own
        return ApiError(400, str(first["msg"]), param=context["param"], code=kind)
    name = _name(first["loc"])
    if not name:
        return ApiError(400, "the body must be a JSON object, sent as application/json")
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unrecognized request argument supplied: {name}", param=name, code="unknown_parameter"
        )
    if kind == "missing":
        message, code = f"missing required parameter: '{name}'", "missing_required_parameter"
        return ApiError(400, message, param=name, code=code)
    return ApiError(400, f"invalid value for '{name}': {first['msg']}", param=name, code="invalid_value")


def _name(place: Sequence[Any]) -> str:
    """("messages", 0, "role") -> "messages[0].role"; the names of a union's branches are left out."""
    name = ""
    for number, part in enumerate(place):
        if isinstance(part, int):
            name += f"[{part}]"
        elif number and (not part.isidentifier() or part in ("str", "int")):
            break  # also "list[str]", "function-after[...]"
        else:
            name += f".{part}" if name else str(part)
    return name
