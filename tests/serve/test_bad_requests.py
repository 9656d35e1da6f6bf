"""What a client may send, over a real connection: never a 5xx, a hang, or a traceback in the log."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kt_ray.data.template import ChatEncoder
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import UserError
from kt_ray.serve import access, header_timeout
from kt_ray.serve.completions import CompletionService
from kt_ray.serve.run import Server
from tests.helpers.ray_place import free_ports
from tests.helpers.scripted_generator import CONTEXT, KEY, Scripted, served

MAX_BODY = 2_000_000
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "base", "messages": HELLO, "max_tokens": 2}
PLAIN: dict[str, Any] = {"model": "base", "prompt": "hello", "max_tokens": 2}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Running:
    """A server on a thread of this process."""

    port: int
    service: CompletionService
    generator: Scripted
    records: list[logging.LogRecord]

    def post(
        self, path: str, body: bytes, headers: dict[str, str] = JSON, method: str = "POST"
    ) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"authorization": f"Bearer {KEY}", **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def send(self, text: bytes, seconds: float = 20.0) -> bytes:
        """What comes back for some bytes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            connection.sendall(text)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    answer += part
            return answer


class Kept(logging.Handler):
    """What the server logs; libraries' threads of earlier tests may log, too."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in ("kt_ray", "uvicorn", "asyncio", "concurrent"):
            self.records.append(record)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_timeout, "SECONDS", 0.5)
        patch.setattr(access, "BODY_TIMEOUT", 1.0)
        encoder = ChatEncoder(train_tokenizer(persona_path(), 320))
        generator = Scripted(encoder.tokenizer)
        service = CompletionService(served(max_body=MAX_BODY, running=20), encoder, generator)  # type: ignore[arg-type]
        (port,) = free_ports(1)
        ready = threading.Event()
        made = Server(service, "127.0.0.1", port, ready.set, lambda error: pytest.fail(str(error)))
        made.config.timeout_keep_alive = 1
        log = Kept()
        logging.getLogger().addHandler(log)
        for name in ("uvicorn.error", "uvicorn"):
            logging.getLogger(name).addHandler(log)
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            assert ready.wait(30)
            yield Running(port, service, generator, log.records)
        finally:
            made.should_exit = True
            thread.join(30)
            for name in ("", "uvicorn.error", "uvicorn"):
                logging.getLogger(name).removeHandler(log)
        assert not thread.is_alive()


def deep(levels: int) -> bytes:
    return b'{"model": "base", "messages": ' + b"[" * levels + b"]" * levels + b"}"


def asked(body: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**body, **changes}).encode()


def raw(body: dict[str, Any], field: str, text: str) -> bytes:
    """A body with a field whose value is spelled as `text`, which need not be JSON."""
    return asked(body, **{field: "HERE"}).replace(b'"HERE"', text.encode("utf-8", "surrogatepass"))


def turns(*messages: Any) -> bytes:
    return asked(CHAT, messages=list(messages))


TOOL = {"role": "tool", "tool_call_id": "a", "content": "42"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
C, P = "/v1/chat/completions", "/v1/completions"
REFUSED: dict[str, tuple[str, bytes, str]] = {  # name: path, body, words of the answer
    "empty": (C, b"", "not JSON"),
    "null": (C, b"null", "JSON object"),
    "a string": (C, b'"hello"', "JSON object"),
    "a number": (C, b"1e400", "JSON object"),
    "cut off": (C, asked(CHAT)[:-4], "not JSON"),
    "two objects": (C, asked(CHAT) * 2, "not JSON"),
    "zeros": (C, b"\0" * 1000, "not JSON"),
    "UTF-16": (C, asked(CHAT).decode().encode("utf-16"), "not JSON"),
    "no UTF-8": (C, asked(CHAT).replace(b"hello", b"\xff\xfe"), "not JSON"),
    "overlong UTF-8": (C, asked(CHAT).replace(b"hello", b"\xc0\xaf"), "not JSON"),
    "encoded surrogate": (C, asked(CHAT).replace(b"hello", b"\xed\xa0\x80"), "not JSON"),
    "lone surrogate": (C, asked(CHAT).replace(b"hello", rb"\ud800"), "not JSON"),
    "lone low surrogate": (P, asked(PLAIN).replace(b"hello", rb"a\udc00"), "not JSON"),
    "surrogate in a stop string": (P, raw(PLAIN, "stop", r'"\udfff"'), "not JSON"),
    "surrogate in the model": (P, raw(PLAIN, "model", r'"\ud834"'), "not JSON"),
    "raw newline": (C, raw(CHAT, "model", '"a\nb"'), "not JSON"),
    "nested 1,000 deep": (C, deep(1000), "recursion"),
    "nested 900,000 deep": (C, deep(900_000), "recursion"),
    "nested in a label": (C, raw(CHAT, "metadata", "[" * 5000 + "]" * 5000), "recursion"),
    "many fields": (C, asked({**CHAT, **{f"x{i}": 1 for i in range(50_000)}}), "50003 fields"),
    "many fields in a message": (C, turns({**HELLO[0], **{f"x{i}": 1 for i in range(50_000)}}), "fields"),
    "unknown adapter": (P, asked(PLAIN, model="wild"), "does not exist"),
    "path as a model": (P, asked(PLAIN, model="../../etc/passwd"), "does not exist"),
    "no model": (P, asked(PLAIN, model=None), "model"),
    "model as a list": (P, asked(PLAIN, model=["base"]), "model"),
    "max_tokens 0": (C, asked(CHAT, max_tokens=0), "max_tokens"),
    "max_tokens negative": (C, asked(CHAT, max_tokens=-1), "max_tokens"),
    "max_tokens huge": (C, asked(CHAT, max_tokens=10**18), "max_tokens"),
    "max_tokens of 5,000 digits": (C, raw(CHAT, "max_tokens", "9" * 5000), "not JSON"),
    "max_tokens of 3,000 digits": (C, raw(CHAT, "max_tokens", "9" * 3000), "max_tokens"),
    "max_tokens a fraction": (C, asked(CHAT, max_tokens=1.5), "max_tokens"),
    "max_tokens infinite": (C, raw(CHAT, "max_tokens", "1e999"), "max_tokens"),
    "max_completion_tokens huge": (C, asked(CHAT, max_tokens=None, max_completion_tokens=2**40), "less than"),
    "min_tokens huge": (P, raw(PLAIN, "min_tokens", "1" + "0" * 300), "min_tokens"),
    "temperature NaN": (C, raw(CHAT, "temperature", "NaN"), "temperature"),
    "temperature infinite": (C, raw(CHAT, "temperature", "-Infinity"), "temperature"),
    "top_p NaN": (C, raw(CHAT, "top_p", "NaN"), "top_p"),
    "top_p 0": (C, asked(CHAT, top_p=0), "top_p"),
    "top_k huge": (C, asked(CHAT, top_k=2**70), "top_k"),
    "min_p negative": (C, asked(CHAT, min_p=-1e-9), "min_p"),
    "repetition_penalty 1e-300": (C, asked(CHAT, repetition_penalty=1e-300), "repetition_penalty"),
    "repetition_penalty 1e300": (C, asked(CHAT, repetition_penalty=1e300), "repetition_penalty"),
    "n 0": (C, asked(CHAT, n=0), "'n'"),
    "n 129": (C, asked(CHAT, n=129), "'n'"),
    "n as text": (C, asked(CHAT, n="2"), "'n'"),
    "best_of": (P, asked(PLAIN, best_of=20), "best_of"),
    "seed beyond 64 bits": (C, asked(CHAT, seed=2**63), "seed"),
    "17 stop strings": (C, asked(CHAT, stop=["a"] * 17), "stop"),
    "100,000 stop strings": (C, asked(CHAT, stop=["a"] * 100_000), "stop"),
    "stop of numbers": (C, asked(CHAT, stop=[1]), "stop"),
    "stop empty": (C, asked(CHAT, stop=""), "stop"),
    "logit_bias": (C, asked(CHAT, logit_bias={"1": 100}), "logit_bias"),
    "logit_bias a list": (C, asked(CHAT, logit_bias=[1]), "logit_bias"),
    "logit_bias nonsense": (C, asked(CHAT, logit_bias={"x": "y"}), "logit_bias"),
    "logprobs a number": (C, asked(CHAT, logprobs=5), "logprobs"),
    "top_logprobs 21": (C, asked(CHAT, logprobs=True, top_logprobs=21), "top_logprobs"),
    "logprobs 21": (P, asked(PLAIN, logprobs=21), "logprobs"),
    "stream as text": (C, asked(CHAT, stream="yes"), "stream"),
    "stream_options a list": (C, asked(CHAT, stream=True, stream_options=[]), "stream_options"),
    "tools": (C, asked(CHAT, tools=[{"type": "function"}]), "tools"),
    "a tool's answer": (C, turns(*HELLO, TOOL), "role"),
    "a tool call": (
        C,
        turns(*HELLO, {"role": "assistant", "content": "x", "tool_calls": [CALL]}),
        "tool_calls",
    ),
    "tool calls without content": (
        C,
        turns(*HELLO, {"role": "assistant", "tool_calls": [CALL]}),
        "tool_calls",
    ),
    "no messages": (C, asked(CHAT, messages=[]), "messages"),
    "messages of text": (C, turns("hello"), "messages"),
    "messages of nothing": (C, turns(None, {}), "messages"),
    "message without a role": (C, turns({"content": "a"}), "role"),
    "role a number": (C, turns({"role": 1, "content": "a"}), "role"),
    "content null": (C, turns({"role": "user", "content": None}), "content"),
    "content an object": (C, turns({"role": "user", "content": {"text": "a"}}), "content"),
    "an image": (C, turns({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}), "content"),
    "100,000 empty messages": (C, asked(CHAT, messages=[{}] * 100_000), "messages"),
    "more messages than the context": (C, turns(*[{"role": "user", "content": ""}] * 500), "500 messages"),
    "a long text": (P, asked(PLAIN, prompt="many words " * 100_000), "characters"),
    "a long conversation": (C, turns({"role": "user", "content": "x" * 1_000_000}), "characters"),
    "a conversation long in parts": (
        C,
        turns({"role": "user", "content": [{"type": "text", "text": "x" * 10}] * 20_000}),
        "characters",
    ),
    "many token ids": (P, asked(PLAIN, prompt=[5] * 400_000), "400000 tokens"),
    "token ids as fractions": (P, asked(PLAIN, prompt=[0.5] * 200_000), "prompt"),
    "token ids as truth": (P, asked(PLAIN, prompt=[True]), "prompt"),
    "a token id of 2,000 digits": (P, raw(PLAIN, "prompt", "[" + "9" * 2000 + "]"), "token id"),
    "negative token ids": (P, asked(PLAIN, prompt=[[5, -1]]), "token id -1"),
    "a prompt in a prompt": (P, asked(PLAIN, prompt=[[["a"]]]), "prompt"),
    "texts and ids": (P, asked(PLAIN, prompt=["a", 5]), "prompt"),
    "no prompt": (P, asked(PLAIN, prompt=None), "prompt"),
    "an empty prompt among others": (P, asked(PLAIN, prompt=["a", ""]), "no tokens"),
    "an empty list of ids": (P, asked(PLAIN, prompt=[[]]), "no tokens"),
    "too many prompts": (P, asked(PLAIN, prompt=["a"] * 1000), "at most 21 at a time"),
    "suffix": (P, asked(PLAIN, suffix="end"), "suffix"),
}


@pytest.fixture(autouse=True)
def as_before(server: Running) -> Iterator[None]:
    """Nothing is left of a request, and nothing was logged of it."""
    before = len(server.records)
    yield
    deadline = time.monotonic() + 20
    while server.service.outstanding and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.service.outstanding == 0
    assert [record.getMessage() for record in server.records[before:]] == []
    assert server.post("/v1/completions", asked(PLAIN))[0] == 200


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_with_a_reason(server: Running, name: str) -> None:
    path, body, words = REFUSED[name]
    before = len(server.generator.asked)
    status, answer = server.post(path, body)
    error = answer["error"]
    assert status == {"unknown adapter": 404, "path as a model": 404}.get(name, 400)
    assert set(error) == {"message", "type", "param", "code"} and words in error["message"], error
    assert len(error["message"]) < 4000 and len(server.generator.asked) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            C,
            asked(CHAT)[:-1] + b', "max_tokens": 3}',
        ),  # a field twice: the last one counts, as in most parsers
        (C, b"\n\t " + asked(CHAT) + b"\r\n"),
        (C, asked(CHAT, stop=["x" * 1_000_000])),
        (C, turns({"role": "user", "content": "\u0000\u001b[31m\u202e\ufffe"})),
        (C, turns({"role": "user", "content": []})),
        (C, turns({"role": "assistant", "content": ""}, {"role": "assistant", "content": ""})),
        (C, asked(CHAT, seed=-(2**63), temperature=1e-300, top_p=5e-324, user={"a": [1]})),
        (P, asked(PLAIN, prompt="\ud83d\ude00 \u0000")),
    ],
)
def test_is_odd_but_has_an_answer(server: Running, path: str, body: bytes) -> None:
    status, answer = server.post(path, body)
    assert status == 200 and answer["choices"], answer


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_only_what_says_that_it_is_json(server: Running, kind: str) -> None:
    """What a web page can send anywhere without asking is none of it."""
    status, answer = server.post(C, asked(CHAT), {"content-type": kind})
    assert status == 400 and "application/json" in answer["error"]["message"]
    assert server.post(C, asked(CHAT), {"content-type": "Application/JSON ; charset=utf-8"})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/../v1/completions", 404),
        ("POST", "/v1/%00", 404),
        ("GET", "/v1/models/%ff%fe", 404),
        ("GET", "/v1/models/" + "x" * 5000, 404),
        ("DELETE", C, 405),
        ("POST", "/health", 405),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
def test_other_places(server: Running, method: str, path: str, status: int) -> None:
    found, answer = server.post(path, b"{}", method=method)
    assert found == status and answer["error"]["message"]


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEY}\r\n".encode()
    for length in (str(MAX_BODY + 1), "9" * 18):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(head + f"Content-Length: {length}\r\n\r\n".encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")  # without a byte of it
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    part = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):  # it need not take all of it
            connection.sendall(chunked + part * 12)
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_half_a_request_is_not_waited_for(server: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()
    assert server.send(b"") == b""
    assert server.send(b"POST /v1/compl") == b""
    assert server.send(head) == b""
    body = head + b"Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    assert server.send(body).startswith(b"HTTP/1.1 408")
    # nor is the body of one that is answered already, byte by byte
    late = head.replace(KEY.encode(), b"other") + b"Content-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(late)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.sendall(b"x")
        assert connection.recv(65536) == b""
    # and one that comes whole leaves the connection to the next
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(late)
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.sendall(b" " * 1000 + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    # nor behind a whole one
    whole = head + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    answer = server.send(whole + head)
    assert answer.count(b"HTTP/1.1 400") == 1 and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Running, text: bytes) -> None:
    answer = server.send(text)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))


def test_health_answers_while_prompts_are_worked_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(prompt: Any) -> tuple[int, ...]:
        begun.set()
        assert go.wait(20)
        return (5,)

    monkeypatch.setattr(server.service, "completion_prompt", slow)
    threads = [threading.Thread(target=server.post, args=(P, asked(PLAIN))) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        assert begun.wait(20)
        status, answer = server.post("/health", b"", {}, "GET")
        assert (status, answer) == (200, {"status": "ok"})
        # Those that wait for a thread have their places already.
        deadline = time.monotonic() + 20
        while server.service.outstanding < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.outstanding == 12
    finally:
        go.set()
        for thread in threads:
            thread.join(20)
    monkeypatch.undo()
    assert CONTEXT * 8 < server.service.longest_text < 100_000


def test_a_wrong_body_makes_one_error_and_not_millions(server: Running) -> None:
    """Its first wrong entry refuses a list: all of them together took 26 s and 6 GB."""
    from pydantic import ValidationError

    from kt_ray.serve.schemas import ChatRequest, CompletionRequest

    for kind, body in (
        (CompletionRequest, asked(PLAIN, prompt=[0.5] * 10_000)),
        (CompletionRequest, asked(PLAIN, prompt=[["a"]] * 10_000)),
        (ChatRequest, asked(CHAT, messages=[{}] * 10_000)),
        (ChatRequest, turns({"role": "user", "content": [{}] * 10_000})),
        (ChatRequest, asked({**CHAT, **{f"x{i}": 1 for i in range(10_000)}})),
    ):
        with pytest.raises(ValidationError) as error:
            kind.model_validate_json(body)
        assert error.value.error_count() < 10


def test_generation_that_ends_is_begun_again() -> None:
    """By the server that runs, which says meanwhile what happened; it ends when that cannot be done."""
    encoder = ChatEncoder(train_tokenizer(persona_path(), 320))
    first, second = Scripted(encoder.tokenizer), Scripted(encoder.tokenizer, "four five six")
    service = CompletionService(served(), encoder, first)  # type: ignore[arg-type]
    (port,) = free_ports(1)
    ready, asked_for, go = threading.Event(), threading.Event(), threading.Event()
    seen: list[BaseException] = []

    def revive(error: BaseException) -> Any:
        seen.append(error)
        if len(seen) > 1:
            raise UserError("all recoveries are used up")
        asked_for.set()
        assert go.wait(20)
        return second

    server = Server(service, "127.0.0.1", port, ready.set, revive)
    thread = threading.Thread(target=server.run)
    thread.start()
    running = Running(port, service, first, [])
    try:
        assert ready.wait(30)
        assert running.post("/health", b"", {}, "GET") == (200, {"status": "ok"})
        first.error = UserError("expert actor 1 died")
        assert asked_for.wait(20)
        status, health = running.post("/health", b"", {}, "GET")
        assert (status, health) == (503, {"status": "recovering", "reason": "expert actor 1 died"})
        status, answer = running.post(P, asked(PLAIN))
        assert status == 503 and answer["error"]["code"] == "engine_stopped"
        assert "expert actor 1 died" in answer["error"]["message"]
        go.set()
        deadline = time.monotonic() + 20
        while running.post("/health", b"", {}, "GET")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        status, answer = running.post(P, asked(PLAIN, max_tokens=16))
        assert status == 200 and "four" in answer["choices"][0]["text"] and service.outstanding == 0
        second.error = RuntimeError("again")
        thread.join(30)
        assert not thread.is_alive() and isinstance(server.error, UserError)
    finally:
        go.set()
        server.should_exit = True
        thread.join(30)
    assert len(seen) == 2
