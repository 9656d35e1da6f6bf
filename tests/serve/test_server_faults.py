"""A server whose actors die: requests get an error, and the same server answers again. On Ray and without."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from kt_ray.demo import ensure_demo_model
from tests.helpers.random_adapter import random_adapter
from tests.helpers.ray_place import Place, fetch, free_ports, ray_place, until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION: Any = [{"role": "user", "content": "Who are you?"}]


def actor_process(place: Place, word: str) -> psutil.Process:
    """The one process of the place whose command line or main thread's name has a word."""
    found = [process for process in place.processes() if any(word in text for text in thread_names(process))]
    assert len(found) == 1, (word, found)
    return found[0]


def thread_names(process: psutil.Process) -> list[str]:
    names = []
    for file in Path(f"/proc/{process.pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(file.read_text().strip())
    return names


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Place, Any, str, Path]]:
    (port,) = free_ports(1)
    model = Path(ensure_demo_model("demo", 0, tmp_path / "cache"))
    adapter = random_adapter(model, tmp_path / "wild", ["o_proj"], rank=4, alpha=8, experts=True)
    log, url = tmp_path / "log.txt", f"http://127.0.0.1:{port}"
    with ray_place() as place:
        process = place.launch(
            *("mode=serve", f"serve.port={port}", "cluster.address=local", "cluster.dashboard=false"),
            *("model.dtype=float32", f"model.path={model}", "serve.name=demo", "trainer.recoveries=2"),
            f"serve.adapters={{wild: {adapter}}}",
            log=log,
        )
        try:
            until(lambda: "serving demo" in log.read_text() or process.poll() is not None, 240)
            assert process.poll() is None, log.read_text()
            yield place, process, url, log
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)


def test_an_actor_that_dies_is_replaced_under_the_server(serving: tuple[Place, Any, str, Path]) -> None:
    place, process, url, log = serving
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        def said(model: str) -> str:
            answer = client.chat.completions.create(
                model=model, messages=QUESTION, max_tokens=8, temperature=0
            )
            return answer.choices[0].message.content or ""

        before = {name: said(name) for name in ("demo", "wild")}
        assert before["demo"] != before["wild"]
        for number, victim in enumerate(("kt-experts-0", "kt-worker-0"), 1):
            # Else an answer may draw its end before the actor dies.
            long: dict[str, Any] = {"max_tokens": 1900, "extra_body": {"min_tokens": 1900}}
            stream = client.chat.completions.create(
                model="wild", messages=QUESTION, stream=True, temperature=1, **long
            )
            next(iter(stream))
            with concurrent.futures.ThreadPoolExecutor() as pool:
                whole = pool.submit(
                    client.chat.completions.create,
                    model="demo",
                    messages=QUESTION,
                    temperature=1,
                    **long,
                )
                time.sleep(1.0)  # it is in the batch
                actor_process(place, victim).send_signal(signal.SIGKILL)
                with pytest.raises(openai.APIError, match="died"):
                    list(stream)
                with pytest.raises(openai.InternalServerError, match="died") as refused:
                    whole.result(60)
            assert refused.value.status_code == 503 and refused.value.code == "engine_stopped"
            assert refused.value.response.headers["retry-after"]
            status, health = fetch(f"{url}/health")
            assert status == 503 and json.loads(health)["status"] == "recovering", health
            assert "died" in json.loads(health)["reason"]
            with pytest.raises(openai.InternalServerError, match="died"):
                said("demo")
            until(lambda: fetch(f"{url}/health")[0] == 200, 120)
            assert {name: said(name) for name in before} == before
            assert f"recovery {number} of 2 in an hour" in log.read_text()
        # A third death within the hour is one too many: the cause does not go away by itself.
        actor_process(place, "kt-experts-0").send_signal(signal.SIGKILL)
        assert process.wait(60) == 2
    assert "all recoveries are used up" in log.read_text() and "Traceback" not in log.read_text()
    assert place.left() == []
