"""The application over a generator that says what the test wants: errors, limits, leaving. No model."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kt_ray.data.template import ChatEncoder
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer
from kt_ray.generate.requests import Request, Token
from kt_ray.serve.access import bare, check_address, digest, is_loopback
from kt_ray.serve.api_errors import ApiError
from kt_ray.serve.app import make_app
from kt_ray.serve.completions import CompletionService, Room
from kt_ray.serve.replies import spell
from kt_ray.serve.run import AnnouncedServer, check_port, http_config, make_service
from kt_ray.serve.schemas import CompletionRequest
from tests.helpers.scripted_generator import CONTEXT, KEY, Scripted, served

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(train_tokenizer(persona_path(), 320))


class Bench:
    """An application with its generator, and clients."""

    def __init__(self, encoder: ChatEncoder, **changes: Any) -> None:
        self.generator = Scripted(encoder.tokenizer)
        self.service = CompletionService(served(**changes), encoder, self.generator)
        self.app = make_app(self.service)
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=self.app, raise_app_exceptions=False),
            base_url="http://127.0.0.1:8000",
        )
        self.client = openai.AsyncOpenAI(
            base_url="http://127.0.0.1:8000/v1", api_key=KEY, http_client=self.http, max_retries=0
        )

    async def post(self, path: str, body: Any, key: str | None = KEY) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if isinstance(body, bytes):
            return await self.http.post(
                path, content=body, headers={**headers, "content-type": "application/json"}
            )
        return await self.http.post(path, json=body, headers=headers)


def run(bench: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(bench(), 30))  # type: ignore[arg-type]


CHAT = {"model": "base", "messages": HELLO}
PLAIN = {"model": "base", "prompt": "hello"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code", "words"),
    [
        ("chat/completions", b"{", 400, None, None, "not JSON"),
        ("chat/completions", b"[]", 400, None, None, "JSON object"),
        ("chat/completions", {"messages": HELLO}, 400, "model", "missing_required_parameter", "missing"),
        ("chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found", "base, neko"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages", "invalid_value", "at least 1"),
        ("chat/completions", {**CHAT, "messages": "hi"}, 400, "messages", "invalid_value", "array"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "robot", "content": "a"}]},
            400,
            "messages[0].role",
            "invalid_value",
            "'assistant'",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[0].content",
            "invalid_value",
            "messages[0].content",
        ),
        ("chat/completions", {**CHAT, "tempratur": 1}, 400, "tempratur", "unknown_parameter", "tempratur"),
        ("chat/completions", {**CHAT, "temperature": 3}, 400, "temperature", "invalid_value", "2"),
        ("chat/completions", {**CHAT, "max_tokens": "5"}, 400, "max_tokens", "invalid_value", "integer"),
        ("chat/completions", {**CHAT, "n": True}, 400, "n", "invalid_value", "integer"),
        ("chat/completions", {**CHAT, "stop": [""]}, 400, "stop", "invalid_value", "at least 1"),
        ("chat/completions", {**CHAT, "stop": ["a"] * 17}, 400, "stop", "invalid_value", "16"),
        ("chat/completions", {**CHAT, "tools": [{}]}, 400, "tools", "unsupported_parameter", "tools"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "json_object"}},
            400,
            "response_format",
            "unsupported_parameter",
            "not supported",
        ),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs", None, "needs logprobs=true"),
        ("chat/completions", {**CHAT, "stream_options": {}}, 400, "stream_options", None, "stream=true"),
        (
            "chat/completions",
            {**CHAT, "max_tokens": 2, "max_completion_tokens": 3},
            400,
            "max_tokens",
            None,
            "differ",
        ),
        (
            "chat/completions",
            {**CHAT, "max_tokens": CONTEXT},
            400,
            "messages",
            "context_length_exceeded",
            f"maximum context length is {CONTEXT} tokens",
        ),
        (
            "completions",
            {**PLAIN, "prompt": "many words " * 40},
            400,
            "prompt",
            "context_length_exceeded",
            "shorten the prompt",
        ),
        ("completions", {**PLAIN, "prompt": []}, 400, "prompt", None, "empty"),
        ("completions", {**PLAIN, "prompt": ""}, 400, "prompt", None, "no tokens"),
        ("completions", {**PLAIN, "prompt": [[5], [-1]]}, 400, "prompt", None, "token id -1"),
        ("completions", {**PLAIN, "prompt": [99999]}, 400, "prompt", None, "token id 99999"),
        ("completions", {**PLAIN, "best_of": 2}, 400, "best_of", None, "equals n"),
        ("completions", {**PLAIN, "suffix": "x"}, 400, "suffix", None, "suffix"),
        ("completions", {**PLAIN, "echo": True, "logprobs": 1}, 400, "echo", None, "logprobs"),
        (
            "completions",
            {**PLAIN, "min_tokens": 30},
            400,
            "min_tokens",
            "invalid_value",
            "min_tokens=30 is more than the 16 tokens that the answer can have",
        ),
        (
            "chat/completions",
            {**CHAT, "max_tokens": 5, "min_tokens": 6},
            400,
            "min_tokens",
            "invalid_value",
            "raise max_tokens",
        ),
        ("completions", {**PLAIN, "prompt": "x" * 3000}, 413, None, "request_too_large", "2000 bytes"),
        ("nothing", {}, 404, None, "unknown_url", "/v1/nothing"),
        ("models", {}, 405, None, "method_not_allowed", "POST"),
    ],
)
def test_what_is_wrong_is_said_as_openai_says_it(
    encoder: ChatEncoder, path: str, body: Any, status: int, param: str | None, code: str | None, words: str
) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        response = await made.post(f"/v1/{path}", body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] == param and words in error["message"]
        assert code is None or error["code"] == code
        assert not made.generator.asked

    run(bench)


def test_a_completion_goes_on_its_prompts_text_and_a_chat_answer_does_not(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        own = Bench(encoder)
        for path, body in (("/v1/completions", PLAIN), ("/v1/chat/completions", CHAT)):
            assert (await own.post(path, {**body, "max_tokens": 2})).status_code == 200
        assert [request.continues for request in own.generator.asked] == [True, False]

    run(bench)


def test_the_date_of_a_template_is_the_one_that_is_set(encoder: ChatEncoder, tmp_path: Path) -> None:
    encoder.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    what = served(tokenizer=str(tmp_path), template=str(tmp_path / "dated.jinja"), date="2024-02-03")
    service = make_service(what, Scripted(encoder.tokenizer))  # type: ignore[arg-type]
    assert service.encoder.render(HELLO, prompt=True).startswith("2024-02-03")


def test_how_much_an_answer_thinks_is_the_templates_to_take(encoder: ChatEncoder, tmp_path: Path) -> None:
    encoder.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "effort.jinja").write_text(
        "{% set effort = reasoning_effort or 'medium' %}{{ effort }}"
        "{% if effort == 'low' %}{{ raise_exception('too low') }}{% endif %}"
        "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    what = served(tokenizer=str(tmp_path), template=str(tmp_path / "effort.jinja"))
    takes = make_service(what, Scripted(encoder.tokenizer)).encoder  # type: ignore[arg-type]

    async def bench() -> None:
        made = Bench(takes)
        for effort in (None, "high", "none"):
            body = {**CHAT, "max_tokens": 1, "reasoning_effort": effort}
            assert (await made.post("/v1/chat/completions", body)).status_code == 200
            text = takes.tokenizer.decode(made.generator.asked[-1].prompt)
            assert text.startswith(effort or "medium")
        for own, effort, words in ((made, "low", "too low"), (Bench(encoder), "high", "is not read by")):
            refused = await own.post("/v1/chat/completions", {**CHAT, "reasoning_effort": effort})
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]

    run(bench)


def test_parameters_that_ask_for_nothing_are_taken(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        answer = await made.client.chat.completions.create(
            model="base",
            messages=[
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " kind"}],
                },
                *HELLO,
            ],
            max_completion_tokens=3,
            presence_penalty=0,
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            user="me",
            metadata={"a": "b"},
            store=False,
            logit_bias={},
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
        )
        sampling = made.generator.asked[0].sampling
        assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.1)
        assert (sampling.temperature, sampling.top_p, sampling.min_new_tokens) == (1.0, 1.0, 1)
        prompt = encoder.tokenizer.decode(made.generator.asked[0].prompt)
        assert "be kind" in prompt and "system" in encoder.render(
            ({"role": "system", "content": "be kind"},), prompt=False
        )
        # what a client sends back is what it was given
        again: Any = [*HELLO, answer.choices[0].message, *HELLO]
        await made.client.chat.completions.create(model="base", messages=again, max_tokens=2)

    run(bench)


def test_the_key(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        for key in (None, "another key", KEY + "x"):
            response = await made.post("/v1/completions", PLAIN, key)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await made.http.get("/v1/models")).status_code == 401
        assert (await made.http.get("/openapi.json")).status_code == 401
        assert (await made.http.get("/health")).json() == {"status": "ok"}
        assert (await made.post("/v1/completions", PLAIN)).status_code == 200
        assert (await Bench(encoder, key=None).post("/v1/completions", PLAIN, None)).status_code == 200
        wrong = made.client.with_options(api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()

    run(bench)


def test_a_key_beyond_ascii_and_with_space_around_it(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder, key=digest(" schlüssel\n"))
        sent = [
            (b"Bearer " + "schlüssel".encode(), 200),
            (b"bearer  " + "schlüssel".encode("latin-1") + b" ", 200),
            (b"Bearer schl", 401),
            (b"Bearer " + "schlüssel".encode("utf-16"), 401),
            ("schlüssel".encode(), 401),
        ]
        for value, status in sent:
            response = await made.http.get("/v1/models", headers={b"authorization": value})
            assert response.status_code == status, value
        sent_by_most = {b"authorization": b"Bearer " + "voilà".encode()}  # ends in Latin-1's no-break space
        made = Bench(encoder, key=digest("voilà"))
        assert (await made.http.get("/v1/models", headers=sent_by_most)).status_code == 200

    run(bench)


def test_without_a_key_only_by_a_name_of_this_machine(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        open_to_all, with_key = Bench(encoder, key=None), Bench(encoder)
        good = ("127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LocalHost", "[::1]:8000", "[::1]")
        bad = (
            "rebound.example:8000",
            "rebound.example",
            "127.0.0.1.rebound.example",
            "192.168.1.2:8000",
            "localhost.rebound.example:80",
            "0.0.0.0:8000",
            "[2001:db8::1]:8000",
            "x:127.0.0.1",
        )
        for host in (*good, *bad):
            response = await open_to_all.http.post(
                "/v1/completions", json=PLAIN, headers={"host": host, "origin": f"http://{host}"}
            )
            assert response.status_code == (200 if host in good else 403), host
            if host in bad:
                error = response.json()["error"]
                assert error["code"] == "host_not_allowed" and host in error["message"]
            keyed = {"host": host, "authorization": f"Bearer {KEY}"}
            assert (await with_key.http.get("/v1/models", headers=keyed)).status_code == 200
        assert len(open_to_all.generator.asked) == len(good)
        assert (await open_to_all.http.get("/health", headers={"host": bad[0]})).status_code == 200

    run(bench)


def test_brackets_around_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [bare(host) for host in ("[::1]", "::1", "127.0.0.1")] == ["::1", "::1", "127.0.0.1"]
    bound: list[Any] = []
    monkeypatch.setattr("socket.socket.bind", lambda self, address: bound.append(address))
    check_port("[::1]", 80)
    assert bound == [("::1", 80)]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.5.0.1")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.2", "my.host")),
    ],
)
def test_beyond_this_machine_only_with_a_key(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    check_address(host, "key")
    if loopback:
        check_address(host, None)
    else:
        with pytest.raises(UserError, match="KT_RAY_API_KEY"):
            check_address(host, None)


def test_a_body_without_a_length_is_measured(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        made = Bench(encoder)
        response = await made.http.post(
            "/v1/completions",
            content=parts(),
            headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
        )
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"

    run(bench)


def test_a_full_queue_refuses_all_of_a_request_or_none(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)  # two run, one waits
        with pytest.raises(openai.BadRequestError, match="takes at most 3 at a time"):  # not to be repeated
            await made.client.completions.create(model="base", prompt="a", n=4)
        assert not made.generator.asked
        assert len((await made.client.completions.create(model="base", prompt="a", n=3)).choices) == 3
        made.generator.waits = True
        running = asyncio.ensure_future(made.post("/v1/completions", {**PLAIN, "n": 3}))
        while len(made.generator.asked) < 6:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="3 answers are running") as refused:
            await made.client.completions.create(model="base", prompt="a")
        assert refused.value.response.headers["retry-after"] == "1"
        # Refused before any of it is tokenized or looked into further.
        made.service._tokens = made.service.chat_prompt = lambda *_, **__: pytest.fail("tokenized")  # type: ignore[method-assign]
        for path, body in (
            ("completions", {**PLAIN, "prompt": ["a"] * 300, "max_tokens": 10**9}),
            ("completions", {**PLAIN, "prompt": [[10**9]] * 2, "n": 128}),
            ("chat/completions", CHAT),
        ):
            response = await made.post(f"/v1/{path}", body)
            assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
        for answer in made.generator.answers[3:]:
            answer.take(Token(answer.number, 5, finish="length"))
        assert (await running).status_code == 200 and made.service.outstanding == 0

    run(bench)


async def leave(app: Any, body: dict[str, Any], after: int) -> list[dict[str, Any]]:
    """A request whose client leaves after so many messages of the answer; what was sent."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) >= after:
            gone.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("test", 80),
        "client": ("test", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")],
    }
    if not after:
        gone.set()
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize(("stream", "after"), [(True, 2), (False, 0)])
def test_who_leaves_stops_paying(encoder: ChatEncoder, stream: bool, after: int) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        made.generator.waits = True
        await leave(made.app, {**PLAIN, "n": 2, "stream": stream}, after)
        assert made.generator.cancelled == [0, 1] and made.service.outstanding == 0

    run(bench)


def test_a_service_whose_generation_ends(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        made.generator.waits = True
        pieces = []

        async def read() -> None:
            stream = await made.client.completions.create(model="base", prompt="a", stream=True)
            async for chunk in stream:
                pieces.append(chunk)

        reading = asyncio.ensure_future(read())
        whole = asyncio.ensure_future(made.post("/v1/completions", PLAIN))
        while len(made.generator.answers) < 2:
            await asyncio.sleep(0.01)
        made.generator.error = UserError("expert actor 1 died")
        for answer in made.generator.answers:
            answer.fail(made.generator.error)
        with pytest.raises(openai.APIError, match="expert actor 1 died"):
            await reading
        assert (await whole).status_code == 503
        assert (await made.post("/v1/completions", PLAIN)).status_code == 503
        assert (await made.http.get("/health")).status_code == 503
        assert made.service.outstanding == 0

    run(bench)


def test_a_request_that_the_generator_refuses(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)

        def refuses(request: Request, listener: Any = None) -> Answer:
            raise UserError("a token id is not in the vocabulary", remedy="use the model's tokenizer")

        made.generator.submit = refuses  # type: ignore[method-assign]
        response = await made.post("/v1/completions", {**PLAIN, "n": 2})
        assert response.status_code == 400 and "vocabulary" in response.json()["error"]["message"]
        assert made.service.outstanding == 0

        def ends(request: Request, listener: Any = None) -> Answer:
            made.generator.error = RuntimeError("an actor died meanwhile")
            raise UserError("this session of generation has ended")

        made.generator.submit = ends  # type: ignore[method-assign]
        with Room(made.service) as room, pytest.raises(ApiError, match="generation has stopped") as stopped:
            made.service.start(made.service.requests(CompletionRequest(**PLAIN), [(1, 2)]), room)
        assert stopped.value.status == 503

    run(bench)


def test_one_answer_that_fails_is_an_error_of_its_own(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        made.generator.waits = True
        whole = asyncio.ensure_future(made.post("/v1/completions", PLAIN))
        while not made.generator.answers:
            await asyncio.sleep(0.01)
        made.generator.answers[0].take(Token(0, -1, finish="error", error="logits are not finite"))
        response = await whole
        assert response.status_code == 500 and "not finite" in response.json()["error"]["message"]
        made.service.stop()
        assert (await made.post("/v1/completions", PLAIN)).json()["error"]["code"] == "shutting_down"

    run(bench)


@pytest.mark.parametrize("body", [CHAT, PLAIN])
def test_an_event_is_one_line_to_every_client(encoder: ChatEncoder, body: dict[str, Any]) -> None:
    text = "a\u2028b\u2029c\x85d"

    async def bench() -> None:
        made = Bench(encoder)
        made.generator.says = encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await made.post(path, {**body, "stream": True, "max_tokens": 40})
        lines = [line for line in response.text.splitlines() if line]  # as many clients cut them
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
        assert lines[-1] == "data: [DONE]"
        said = [one["delta"].get("content", "") if "delta" in one else one["text"] for one in chunks]
        assert "".join(said) == text

    run(bench)


def test_limits_of_an_answer(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        prompt = len((await made.client.completions.create(model="base", prompt="hello")).choices)
        assert prompt == 1 and made.generator.asked[-1].sampling.max_new_tokens == 16
        await made.client.chat.completions.create(model="base", messages=HELLO)
        request = made.generator.asked[-1]
        assert len(request.prompt) + request.sampling.max_new_tokens == CONTEXT
        small = Bench(encoder, max_tokens=5)
        await small.client.chat.completions.create(model="base", messages=HELLO)
        assert small.generator.asked[-1].sampling.max_new_tokens == 5
        with pytest.raises(openai.BadRequestError, match=r"serve\.max_tokens"):
            await small.client.chat.completions.create(model="base", messages=HELLO, max_tokens=6)

    run(bench)


def test_seeds_of_several_answers_differ(encoder: ChatEncoder) -> None:
    async def bench() -> None:
        made = Bench(encoder)
        await made.client.completions.create(model="neko", prompt="a", n=3, seed=-1)
        seeds = [request.sampling.seed for request in made.generator.asked]
        assert seeds == [2**63 - 1, 0, 1] and {r.adapter for r in made.generator.asked} == {"neko"}
        await made.client.completions.create(model="base", prompt="a", n=2)
        first, second = (request.sampling.seed for request in made.generator.asked[3:])
        assert second == first + 1 and made.generator.asked[3].adapter is False

    run(bench)


def test_tokens_have_their_bytes(encoder: ChatEncoder) -> None:
    tokenizer = encoder.tokenizer
    text = "猫 says é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spelled = [spell(tokenizer, token) for token in ids]
    assert any("�" in word for word, _ in spelled)  # a character in parts
    assert bytes(byte for _, raw in spelled for byte in raw or []) == text.encode()


@pytest.mark.parametrize("decoder", ["llama", "metaspace"])
def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes(decoder: str) -> None:
    words = ("<unk>", "</s>", "▁", "▁▁", "▁the", "▁cat", "s", "<0xE7>", "<0x8C>", "<0xAB>")
    vocabulary = {word: number for number, word in enumerate(words)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    llama = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    model.decoder = decoders.Sequence(list(llama)) if decoder == "llama" else decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")

    def of(*names: str) -> list[tuple[str, bytes]]:
        spelled = [spell(tokenizer, vocabulary[name]) for name in names]
        return [(text, bytes(raw or [])) for text, raw in spelled]

    assert of("▁the", "▁cat", "s") == [(" the", b" the"), (" cat", b" cat"), ("s", b"s")]
    assert of("▁", "▁▁", "</s>") == [(" ", b" "), ("  ", b"  "), ("</s>", b"</s>")]
    if decoder == "llama":
        assert of("<0xE7>", "<0x8C>", "<0xAB>") == [("�", b"\xe7"), ("�", b"\x8c"), ("�", b"\xab")]


def test_connections_do_not_take_the_files_of_others() -> None:
    """Nor is a client turned away that serve.max_queue admits."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(before[1], 60_000) if before[1] != resource.RLIM_INFINITY else 60_000
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        AnnouncedServer(http_config(None, "127.0.0.1", 1, 1), lambda: None)
        allowed, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert kept == before[1] and allowed >= hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
