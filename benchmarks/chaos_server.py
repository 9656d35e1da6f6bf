"""`mode=serve` under the faults of `chaos.py`: clients ask all the time while actors die, freeze and wait.

Every request must end: with the answer of an undisturbed server, with an error that says to try again, or,
where Ray itself was hurt, with its connection or with the 500 of Ray Serve's proxy. After every fault the
server must answer again, by itself.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import openai
from chaos_faults import Faults, still_running

KINDS = {
    ("SIGKILL", "actor"): 6,
    ("SIGTERM", "actor"): 2,
    ("pause", "actor"): 2,
    ("freeze", "actor"): 1,
    ("memory", "actor"): 1,
    ("SIGKILL", "raylet"): 1,
    ("SIGKILL", "gcs"): 1,
    ("SIGKILL", "dashboard"): 1,
    ("jump", "clock"): 1,
}
CLIENTS = 3
PATIENCE = 300.0  # seconds in which a request ends, and a server is back
SETTLED = 15.0  # seconds after which a dead part of Ray has been noticed
LEAD = 0.01  # in log-probability: requests beside it round differently, which may turn what is closer
ASKED: tuple[tuple[str, str, bool], ...] = tuple(
    (model, prompt, streamed)
    for model in ("demo", "wild")
    for prompt in ("Who are you?", "What do you like to eat?", "Tell me about the sea.", "Good night!")
    for streamed in (False, True)
)


class ServerCampaign:
    """One server and its clients.

    Attributes:
        faults: one record each; answers: how requests ended; problems: what was not as it should be.
        expected: request -> its undisturbed answer; end_seconds: from SIGTERM to the end.
    """

    def __init__(self, work: Path, model: Path, adapter: Path, seed: int, every: float) -> None:
        self.work, self.every = work, every
        self.harm = Faults(work, model, seed, KINDS)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [
            *(sys.executable, "launch.py", "mode=serve", f"serve.port={self.port}", "serve.name=demo"),
            *("cluster.address=local", "cluster.dashboard=true", "rule=cpu_2workers_2sockets"),
            *("model.dtype=float32", f"model.path={model}", f"serve.adapters={{wild: {adapter}}}"),
            *("trainer.recoveries=1000", "trainer.restarts=1000", f"run.root={work / 'runs'}"),
        ]
        self.faults: list[dict[str, Any]] = []
        self.answers: Counter[str] = Counter()
        self.expected: dict[tuple[str, str, bool], str] = {}
        self.problems: list[str] = []
        self.end_seconds = 0.0
        self._over = threading.Event()
        self._odd: list[tuple[float, str]] = []  # answers that only a hurt Ray explains, and when they came

    def go(self, faults: int, seconds: float) -> None:
        """Faults until so many have happened, or the time is over; then the server is told to end."""
        log = self.work / "server.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                self.command,
                cwd=common.REPO,
                env=self.harm.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            self._until_it_answers(process, log)
            self.expected = {asked: self._said(*asked) for asked in ASKED if self._lead(*asked[:2]) > LEAD}
            clients = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
            for client in clients:
                client.start()
            deadline = time.monotonic() + seconds
            while len(self.faults) < faults and time.monotonic() < deadline and not self.problems:
                time.sleep(self.harm.random.uniform(0.2, 1.8) * self.every)
                self._fault(process)
            self._over.set()
            for client in clients:
                client.join(PATIENCE + 60)
                if client.is_alive():
                    self.problems.append("a request did not end")
            process.terminate()
            told = time.monotonic()
            code = process.wait(60)
            self.end_seconds = time.monotonic() - told
            if code != 0:
                self.problems.append(f"the server ended with {code}")
        except (subprocess.TimeoutExpired, TimeoutError, openai.APIError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            self._over.set()
            if process.poll() is None:
                process.kill()
        if "Traceback" in log.read_text(errors="replace"):
            self.problems.append("a traceback in the server's log")
        self.problems += still_running(self.harm)

    def _fault(self, process: subprocess.Popen[bytes]) -> None:
        before = time.monotonic()
        what, target, hit = self.harm.strike(self.work)
        if not hit:
            return
        start = time.monotonic()
        self._until_it_answers(process, self.work / "server.log")
        if target in ("raylet", "gcs"):
            time.sleep(SETTLED)
            self._until_it_answers(process, self.work / "server.log")
            self._odd = [(at, text) for at, text in self._odd if at < before]
        self.problems += [text for _, text in self._odd]
        seconds = time.monotonic() - start
        self.faults.append({"what": what, "target": target, "hit": hit, "seconds": seconds})
        print(f"  {what} {target}: {hit}, answers after {seconds:.1f} s; {dict(self.answers)}", flush=True)

    def _until_it_answers(self, process: subprocess.Popen[bytes], log: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if process.poll() is not None:
                tail = log.read_text(errors="replace").splitlines()[-5:]
                raise TimeoutError(f"the server ended with {process.returncode}: {' | '.join(tail)}")
            with contextlib.suppress(openai.APIError):
                self._said(*ASKED[0])
                return
            time.sleep(0.5)
        raise TimeoutError(f"no answer in {PATIENCE:.0f} s")

    def _ask(self, number: int) -> None:
        turn = number
        while not self._over.is_set():
            asked = list(self.expected)[turn % len(self.expected)]
            turn += 1
            try:
                said = self._said(*asked)
            except openai.APITimeoutError:
                self.problems.append(f"no end of a request in {PATIENCE:.0f} s")
                return
            except openai.APIConnectionError as error:
                self.answers["no connection"] += 1
                self._odd.append((time.monotonic(), f"no connection: {error.__cause__}"))
                time.sleep(0.5)
            except openai.APIStatusError as error:
                self.answers[f"{error.status_code} {error.code}"] += 1
                if error.status_code != 503:
                    self._odd.append((time.monotonic(), f"{error.status_code}: {error}"))
                time.sleep(0.5)
            except openai.APIError as error:  # within a stream
                self.answers[f"stream ended: {error.code}"] += 1
                if error.code != "engine_stopped":
                    self.problems.append(f"a stream ended with {error.code}: {error}")
            else:
                self.answers["as undisturbed" if said == self.expected[asked] else "another"] += 1
                if said != self.expected[asked]:
                    self.problems.append(f"{asked}: {said!r}, undisturbed {self.expected[asked]!r}")

    def _said(self, model: str, prompt: str, streamed: bool) -> str:
        with self._client() as client:
            answer = self._answer(client, model, prompt, stream=streamed)
            if streamed:
                return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
            return answer.choices[0].message.content or ""

    def _lead(self, model: str, prompt: str) -> float:
        """The least by which a token of the answer is more probable than the next best."""
        with self._client() as client:
            answer = self._answer(client, model, prompt, logprobs=True, top_logprobs=2)
        first_two = [token.top_logprobs for token in answer.choices[0].logprobs.content]
        return min(first.logprob - second.logprob for first, second in first_two)

    def _client(self) -> openai.OpenAI:
        address = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE)

    def _answer(self, client: openai.OpenAI, model: str, prompt: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": prompt}]
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=24, temperature=0, **options
        )


def serve(work: Path, faults: int, seconds: float, every: float, seed: int) -> dict[str, Any]:
    """The record of one server's faults."""
    from tests.helpers.random_adapter import random_adapter

    model = common.REPO / "kt_ray" / "demo" / "assets" / "base"
    adapter = random_adapter(model, work / "wild", ["o_proj"], rank=4, alpha=8, experts=True)
    campaign = ServerCampaign(work, model, Path(adapter), seed, every)
    start = time.monotonic()
    campaign.go(faults, seconds)
    campaign.harm.close()
    waits = sorted(fault["seconds"] for fault in campaign.faults)
    return {
        "impl": "kt_ray",
        "kind": "server",
        "seed": seed,
        "every_seconds": every,
        "left_out": campaign.harm.left_out,
        "faults": len(campaign.faults),
        "by_kind": dict(Counter(f"{f['what']} {f['target']}" for f in campaign.faults)),
        "requests": len(campaign.expected),
        "requests_too_close": len(ASKED) - len(campaign.expected),
        "answers": dict(campaign.answers),
        "seconds": time.monotonic() - start,
        "seconds_until_it_answers": {"median": waits[len(waits) // 2], "worst": waits[-1]} if waits else {},
        "seconds_to_end": campaign.end_seconds,
        "problems": campaign.problems,
        "log": campaign.faults,
    }
