"""mode=serve on Ray Serve with two adapters, asked by the official client; then the same without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from transformers import AutoTokenizer

from kt_ray import cli
from kt_ray.demo import ensure_demo_model
from tests.helpers.float32_copy import in_float32
from tests.helpers.random_adapter import random_adapter
from tests.helpers.ray_place import REPO, Place, fetch, free_ports, gone, ray_place, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

KEY = "key of the tests"
QUESTION: Any = [{"role": "user", "content": "Who are you?"}]
CAPACITY = 32 + 200


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: Path
    adapters: dict[str, Path]
    place: Place


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Server]]:
    """The server that runs; another one when a test has ended the last."""
    root = tmp_path_factory.mktemp("serve")
    model = in_float32(Path(ensure_demo_model("demo", 0, root / "cache")), root / "model")
    adapters = {
        "wild": random_adapter(model, root / "wild", ["o_proj"], rank=4, alpha=8, experts=True),
        "calm": random_adapter(model, root / "calm", ["q_a_proj"], rank=2, alpha=2, experts=False),
    }
    names = ", ".join(f"{name}: {path}" for name, path in adapters.items())
    arguments = (
        "cluster.address=local",
        "cluster.dashboard=false",
        "model.dtype=float32",
        f"model.path={model}",
        "serve.name=demo",
        f"serve.adapters={{{names}}}",
        "serve.max_queue=200",
    )
    servers = contextlib.ExitStack()
    running: list[Server] = []

    def nothing_left(place: Place) -> None:
        assert place.left() == []

    def started() -> Server:
        if not running or not any("mode=serve" in command for _, command in running[-1].place.commands()):
            servers.close()
            place = servers.enter_context(ray_place())
            servers.callback(nothing_left, place)
            serving = place.serving("serving demo", root / "log.txt", "mode=serve", *arguments)
            running.append(Server(servers.enter_context(serving), model, adapters, place))
        return running[-1]

    with pytest.MonkeyPatch.context() as patch, servers:
        patch.setenv("KT_RAY_API_KEY", KEY)
        yield started


@pytest.fixture
def server(start: Callable[[], Server]) -> Server:
    return start()


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def chat(client: OpenAI, **settings: Any) -> Any:
    given = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**{**given, **settings})


def together(stream: Any, count: int) -> tuple[list[str], list[Any], list[str], list[Any]]:
    """(texts, log-probabilities, ends, usages) of a stream's answers."""
    texts, scores, ends = [""] * count, [[] for _ in range(count)], [""] * count
    usages: list[Any] = []
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for part in chunk.choices:
            assert not ends[part.index]
            texts[part.index] += (part.delta.content if hasattr(part, "delta") else part.text) or ""
            if part.logprobs is not None:
                scores[part.index] += (
                    part.logprobs.content
                    if hasattr(part, "delta")
                    else list(zip(part.logprobs.tokens, part.logprobs.token_logprobs, strict=True))
                )
            ends[part.index] = part.finish_reason or ""
    return texts, scores, ends, usages


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "wild", "calm"]
    one = client.models.retrieve("wild")
    assert one.id == "wild" and one.object == "model" and one.owned_by == "kt_ray"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("tame")
    assert error.value.code == "model_not_found" and "demo, wild, calm" in error.value.message


def test_a_chat_answer_and_its_stream(client: OpenAI) -> None:
    settings = {"n": 2, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 3}
    whole = chat(client, **settings)
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-") and whole.model == "demo"
    assert whole.system_fingerprint.startswith("kt_") and whole.created > 1_700_000_000
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.role == "assistant"
    assert {choice.finish_reason for choice in whole.choices} <= {"stop", "length"}
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 2 <= usage.completion_tokens <= 16
    stream = chat(client, **settings, stream=True, stream_options={"include_usage": True})
    texts, scores, ends, usages = together(stream, 2)
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert ends == [choice.finish_reason for choice in whole.choices]
    for streamed, choice in zip(scores, whole.choices, strict=True):
        assert [score.token for score in streamed] == [score.token for score in choice.logprobs.content]
        # Whether both answers were read in within one step shows in the last bits.
        assert [score.logprob for score in streamed] == pytest.approx(
            [score.logprob for score in choice.logprobs.content], abs=1e-4
        )
        assert all(len(score.top_logprobs) == 3 for score in streamed)
    assert usages == [usage]
    for choice in whole.choices:
        spelled = b"".join(bytes(score.bytes) for score in choice.logprobs.content)
        assert spelled.decode(errors="ignore") == choice.message.content
        for score in choice.logprobs.content:
            top = [other.logprob for other in score.top_logprobs]
            assert score.logprob <= top[0] <= 0 and top == sorted(top, reverse=True) and len(top) == 3
            assert sum(math.exp(value) for value in top) <= 1.0001


def test_completions_in_every_form(server: Server, client: OpenAI) -> None:
    ids = AutoTokenizer.from_pretrained(server.model)("The moon")["input_ids"]
    create = client.completions.create
    settings: Any = {"model": "demo", "max_tokens": 6, "temperature": 0}
    whole = create(prompt="The moon", logprobs=2, **settings)
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    text, scores = whole.choices[0].text, whole.choices[0].logprobs
    assert whole.usage.prompt_tokens == len(ids)
    assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.top_logprobs) == 6
    assert all(
        top[t] == lp
        for top, t, lp in zip(scores.top_logprobs, scores.tokens, scores.token_logprobs, strict=True)
    )
    assert all(
        lp == max(top.values()) for top, lp in zip(scores.top_logprobs, scores.token_logprobs, strict=True)
    )
    assert scores.text_offset[0] == 0 and scores.text_offset == sorted(scores.text_offset)
    streamed = together(create(prompt="The moon", logprobs=2, stream=True, **settings), 1)
    assert streamed[0] == [text] and streamed[2] == ["length"]
    assert streamed[1] == [list(zip(scores.tokens, scores.token_logprobs, strict=True))]
    both = create(prompt=[ids, ids[:1]], **settings).choices
    assert [choice.index for choice in both] == [0, 1] and both[0].text == text
    assert create(prompt=ids, **settings).choices[0].text == text
    echoed = create(prompt=["The moon", "A"], echo=True, n=2, **settings).choices
    assert [choice.text[:8] for choice in echoed[:2]] == ["The moon"] * 2 and echoed[
        0
    ].text == "The moon" + text
    assert echoed[3].text[0] == "A"
    assert together(create(prompt="The moon", echo=True, stream=True, **settings), 1)[0] == [
        "The moon" + text
    ]


def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: OpenAI) -> None:
    text = chat(client, max_tokens=16).choices[0].message.content
    stop = text[5:8]  # it may begin and end within tokens
    expected = text[: text.index(stop)]
    cut = chat(client, max_tokens=16, stop=["never said", stop], logprobs=True)
    assert cut.choices[0].message.content == expected and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 16
    shown = "".join(score.token for score in cut.choices[0].logprobs.content)
    assert shown.startswith(expected) and not shown[: len(shown) - 1].endswith(stop)
    streamed = together(chat(client, max_tokens=16, stop=stop, stream=True), 1)
    assert streamed[0] == [expected] and streamed[2] == ["stop"]
    unmet = chat(client, max_tokens=16, stop=text[-1] + "\u0001")  # held back to the end
    assert unmet.choices[0].message.content == text and unmet.choices[0].finish_reason == "length"


def test_seeds(client: OpenAI) -> None:
    def said(seed: int | None) -> str:
        return chat(client, temperature=1.0, top_p=0.95, seed=seed, max_tokens=12).choices[0].message.content

    assert said(7) == said(7) != said(8)
    assert said(None) != said(None)


def test_adapters_by_name(client: OpenAI) -> None:
    first = {name: chat(client, model=name).choices[0].message.content for name in ("demo", "wild", "calm")}
    assert len(set(first.values())) == 3

    async def mixed() -> list[tuple[str, str]]:
        async def one(asked: AsyncOpenAI, name: str) -> tuple[str, str]:
            given: Any = {"model": name, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
            return name, (await asked.chat.completions.create(**given)).choices[0].message.content or ""

        async with AsyncOpenAI(base_url=client.base_url, api_key=KEY, max_retries=0) as asked:
            return await asyncio.gather(*(one(asked, name) for name in ["demo", "wild", "calm"] * 4))

    assert all(text == first[name] for name, text in asyncio.run(mixed()))


def test_what_is_wrong(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, max_tokens=100_000)
    assert long.value.code == "context_length_exceeded" and "2048 tokens" in long.value.message
    with pytest.raises(openai.NotFoundError, match="demo, wild, calm"):
        chat(client, model="gpt")
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        chat(client, temperature=-1)
    assert wrong.value.type == "invalid_request_error" and wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.AuthenticationError) as locked:
        chat(client.with_options(api_key="another"))
    assert locked.value.status_code == 401 and locked.value.code == "invalid_api_key"
    assert fetch(f"{server.url}/health") == (200, '{"status":"ok"}')
    assert fetch(f"{server.url}/v1/nothing", KEY)[0] == 404
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="demo", prompt="x" * 9_000_000)
    assert large.value.status_code == 413


def test_who_leaves_makes_room(client: OpenAI) -> None:
    half = CAPACITY // 2
    streams = [chat(client, n=half, max_tokens=1900, stream=True) for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as full:
        chat(client)
    assert full.value.response.headers["retry-after"] == "1"
    for stream in streams:
        next(iter(stream))
        stream.close()

    def room() -> bool:
        with contextlib.suppress(openai.RateLimitError):
            return len(chat(client, n=128, max_tokens=1).choices) == 128
        return False

    until(room, 60)


def test_two_hundred_at_once(client: OpenAI) -> None:
    prompts = [f"Question {number}: what is {number} times {number + 3}?" for number in range(200)]

    async def ask(asked: AsyncOpenAI, prompt: str) -> tuple[str, int, str]:
        stream = await asked.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens, end = "", 0, ""
        async for chunk in stream:
            for part in chunk.choices:
                text += part.delta.content or ""
                end = part.finish_reason or end
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens, end

    async def run() -> list[tuple[str, int, str]]:
        async with AsyncOpenAI(base_url=client.base_url, api_key=KEY, max_retries=0, timeout=240) as asked:
            return await asyncio.gather(*(ask(asked, prompt) for prompt in prompts))

    answers = asyncio.run(run())
    assert len(answers) == 200 and all(end in ("stop", "length") for _, _, end in answers)
    assert all(tokens == 6 or end == "stop" for _, tokens, end in answers)
    assert len({text for text, _, _ in answers}) > 150  # or a mixture would not show
    for prompt, (text, _, _) in list(zip(prompts, answers, strict=True))[::4]:
        alone = chat(client, messages=[{"role": "user", "content": prompt}], max_tokens=6)
        assert alone.choices[0].message.content == text, prompt


def test_the_examples_of_the_docs(server: Server) -> None:
    page = (REPO / "docs" / "serving.md").read_text().replace("http://127.0.0.1:8000", server.url)
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL)
    curl = next(text for kind, text in blocks if kind == "bash" and "curl" in text)
    python = next(text for kind, text in blocks if kind == "python")
    environment = {**os.environ, "KT_RAY_API_KEY": KEY}
    out = subprocess.run(
        ["bash", "-ec", curl], env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert '"status":"ok"' in out and '"object":"list"' in out and '"object":"chat.completion"' in out
    assert out.rstrip().endswith("data: [DONE]") and '"error"' not in out
    out = subprocess.run(
        [sys.executable, "-c", python],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert {"demo", "wild", "calm"} <= {line.split(" ")[0] for line in out.splitlines()}
    assert "CompletionUsage" in out


def test_without_ray(server: Server, client: OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_RAY_API_KEY", raising=False)
    arguments = (
        "cluster=local",
        "model.dtype=float32",
        f"model.path={server.model}",
        "serve.name=demo",
        f"serve.adapters={{wild: {server.adapters['wild']}}}",
    )
    with contextlib.ExitStack() as stack:
        with (
            ray_place() as place,
            place.serving("serving demo", tmp_path / "log.txt", "mode=serve", *arguments) as url,
        ):
            local = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
            for name in ("demo", "wild"):
                said = [chat(asked, model=name).choices[0].message.content for asked in (local, client)]
                assert said[0] == said[1]
            long = chat(local, max_tokens=2000, n=16, temperature=1, stream=True)
            next(iter(long))
        with pytest.raises(openai.APIError, match="shutting down"):  # said in the stream, not just cut off
            list(long)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serve.host=0.0.0.0", "KT_RAY_API_KEY"),
        ("serve.host=203.0.113.7", "KT_RAY_API_KEY"),
        ("serve.adapters={demo: here}", "the base model's name"),
        ("serve.adapters={a: nowhere}", "serve.adapters="),
        ("generate.adapter=here", "requests name adapters"),
        ("serve.port=0", "serve.port"),
    ],
)
def test_what_cannot_be_served_is_refused_before_ray(
    override: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.delenv("KT_RAY_API_KEY", raising=False)
    (port,) = free_ports(1)
    arguments = [f"serve.port={port}"] if "port" not in override else []
    assert cli.main(["mode=serve", *arguments, override]) == 2
    error = capsys.readouterr().err
    assert words in error and "To fix" in error and not ray.is_initialized()


def test_a_port_that_is_taken(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mode=serve", f"serve.port={server.url.rpartition(':')[2]}"]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_sigterm_with_a_stream_and_half_a_request(server: Server, client: OpenAI) -> None:
    """Afterwards the server is gone."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert half.recv(100) == b""  # Ray Serve's own proxy would wait for ever
    stream = chat(client, max_tokens=2000, stream=True, temperature=1, n=4)
    next(iter(stream))
    (driver,) = (p for p, command in server.place.commands() if "mode=serve" in command)
    driver.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    until(lambda: gone(driver.pid), 60)
