"""Request bodies. An unsupported parameter is refused by name, unless its value changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# Labels for the provider's bookkeeping: they change nothing.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
# Parameters without support, with the values that ask for nothing (null always does).
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "refusal": (),
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
    "annotations": ([],),
    "name": (),
}

T = TypeVar("T")
# Its first wrong entry is enough to refuse a list: a megabyte of wrong ones would make a gigabyte of errors.
Items = Annotated[list[T], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=16)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
MAX_FIELDS = 100  # of one JSON object; each unknown one is an error of its own


def unsupported(name: str, why: str = "is not supported by this server; leave it out") -> PydanticCustomError:
    """The error for a parameter, which `api_errors.of_validation` turns into the answer."""
    # The text goes in as a value: braces in it are not a template's.
    return PydanticCustomError("unsupported_parameter", "{text}", {"param": name, "text": f"{name} {why}"})


class Body(BaseModel):
    """Fields are exactly those declared, of exactly their types."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    labels: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, given: Any) -> Any:
        """Drop what asks for nothing, a null in the place of a default included."""
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:
            text = f"an object of the request has {len(given)} fields, more than {MAX_FIELDS}"
            raise PydanticCustomError("too_many_fields", "{text}", {"param": None, "text": text})
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        kept = {}
        for name, value in given.items():
            if name in cls.neutral and value is not None and value not in cls.neutral[name]:
                raise unsupported(name)
            if name in cls.neutral or name in cls.labels or (value is None and name in optional):
                continue
            kept[name] = value
        return kept


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message; parts are joined."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = MESSAGE_NEUTRAL

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Body):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class Common(Body):
    """What both kinds of request have. Beyond OpenAI's: top_k, min_p, repetition_penalty, min_tokens."""

    labels: ClassVar[tuple[str, ...]] = LABELS

    model: str
    max_tokens: Count | None = None
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # beyond, logits are no longer finite
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options", "is only allowed with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = CHAT_NEUTRAL

    messages: Items[ChatMessage] = Field(min_length=1)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise unsupported("max_tokens", "and max_completion_tokens differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise unsupported("top_logprobs", "needs logprobs=true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        """Log-probabilities per token; None = none are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """POST /v1/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NEUTRAL, "suffix": ("",)}

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None

    @model_validator(mode="after")
    def _agrees(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise unsupported("best_of", "is not supported unless it equals n")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "is not supported together with logprobs")
        if not self.prompt and not isinstance(self.prompt, str):
            raise unsupported("prompt", "is empty")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Log-probabilities per token; None = none are asked for."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, as texts or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [list(self.prompt)]  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]
