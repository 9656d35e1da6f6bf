"""Generation on whole clusters against Hugging Face's `generate`, row by row and greedy."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kt_ray.actors.cluster import ActorCluster
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling, SessionSpec, Token
from kt_ray.generate.sampling import RowSampler
from tests.helpers.devices import DEVICES, layers_on
from tests.helpers.exhaustive import exhaustive
from tests.helpers.families import save_whole, write_config
from tests.helpers.generation import answers, hugging_face, random_prompts, replicas_answers
from tests.helpers.hf_reference import FAMILIES, Row, build_checkpoint, random_rows
from tests.helpers.runs import by_row, config_for, local_cluster, one_pass, steps, waves_of
from tests.helpers.tiny_families import tiny_family

LENGTHS = (5, 9, 3, 12, 7)
NEW = 16
TWO = ("rule.stages=2", "rule.experts.sockets=2")
EAGER = ("gpt_oss", "deepseek_v4")
# Windows shorter than the prompts; one layer of four with full attention.
CHANGES: dict[str, dict[str, int]] = {
    "gpt_oss": {"sliding_window": 6},
    "qwen3_next": {"num_hidden_layers": 4},
    "minimax": {"num_key_value_heads": 2, "num_local_experts": 4},
}


def checkpoint(root: Path, family: str) -> Path:
    if family in FAMILIES:
        return build_checkpoint(root, family)
    return tiny_family(root, family, **CHANGES.get(family, {}))


@pytest.mark.accept("generation")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_greedy_answers_are_hugging_faces(
    tmp_path: Path, family: str, stages: int, replicas: int, device: str
) -> None:
    """A batch of different lengths, rows that join and leave, and prompts read in one by one."""
    path = checkpoint(tmp_path, family)
    prompts = random_prompts(LENGTHS)
    expected = hugging_face(path, prompts, max_new_tokens=NEW, eos_token_id=None)
    assert len({tuple(answer) for answer in expected}) == len(expected)
    sampling = Sampling(max_new_tokens=NEW)
    layout = layers_on(device, dims_from_dir(str(path)).num_layers, stages, replicas)
    config = config_for(path, *layout, f"rule.experts.sockets={stages}")
    with local_cluster(path, config) as cluster:
        assert answers(cluster, prompts, sampling) == expected
        assert answers(cluster, prompts, sampling, max_rows=2) == expected
        assert answers(cluster, prompts, sampling, prefill_tokens=1) == expected


@pytest.mark.parametrize(
    "family", [*("gpt_oss", "qwen3_next", "deepseek_v4", "granitemoe", "longcat_flash", "minimax_m2")]
)
def test_other_kinds_of_caches_and_layers(tmp_path: Path, family: str) -> None:
    """Sliding windows, states of linear attention, compressed caches that cannot be joined, two per layer."""
    path = checkpoint(tmp_path, family)
    attention = "eager" if family in EAGER else "sdpa"
    prompts = random_prompts(LENGTHS)
    expected = hugging_face(path, prompts, attention=attention, max_new_tokens=NEW, eos_token_id=None)
    sampling = Sampling(max_new_tokens=NEW)
    with local_cluster(path, config_for(path, f"model.attn_implementation={attention}")) as cluster:
        assert answers(cluster, prompts, sampling) == expected
        assert answers(cluster, prompts, sampling, max_rows=2) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
        ("mistral_large4", {"kv_source_layers": [0, 1, 0, 1], "no_rope_layers": [0, 1, 0, 1]}),
        ("hy_v4", {}),
        ("gemma4", {}),
        ("qwen4_exp", {}),
    ],
)
def test_layers_that_take_what_earlier_ones_computed(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """The choice of an index, keys and values; Gemma 4 has a place for them."""
    changes |= {} if family == "gemma4" else {"index_n_heads": 64, "index_topk": 8}
    path = write_config(tmp_path, family, **changes)
    save_whole(path)
    prompts = random_prompts(LENGTHS)
    expected = hugging_face(path, prompts, attention="eager", max_new_tokens=NEW, eos_token_id=None)
    sampling = Sampling(max_new_tokens=NEW)
    with local_cluster(path, config_for(path, "model.attn_implementation=eager")) as cluster:
        assert answers(cluster, prompts, sampling) == expected
        assert answers(cluster, prompts, sampling, max_rows=2) == expected
        assert answers(cluster, prompts, sampling, prefill_tokens=1) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("deepseek_v3", 2),
        ("qwen3_moe", 1),
        *((family, 1) for family in ("gpt_oss", "qwen3_next", "deepseek_v4", "minimax")),
    ],
)
def test_answers_to_one_prompt_share_its_prefill(
    tmp_path: Path, family: str, stages: int, device: str
) -> None:
    """Latent keys, grouped heads, windows, states, compressed caches: as if each had its own. Rows
    of the group end at different times, and some wait for others'."""
    path = checkpoint(tmp_path, family)
    attention = "eager" if family in EAGER else "sdpa"
    prompts = random_prompts((9, 12))
    layout = layers_on(device, dims_from_dir(str(path)).num_layers, stages)
    config = config_for(path, f"model.attn_implementation={attention}", *layout)
    asked = [
        Request(prompt, Sampling(max_new_tokens=4 + 3 * n, temperature=1.0, seed=n + 9 * first), False)
        for first, prompt in enumerate(prompts)
        for n in range(4)
    ]
    with local_cluster(path, config) as cluster:
        with Generator(cluster) as one_by_one:
            alone = [one_by_one.submit(request).result(60).tokens for request in asked]
        for rows in (32, 3):
            with Generator(cluster, max_rows=rows) as generator:
                got = [answer.result(60).tokens for answer in generator.submit_all(asked)]
            assert got == alone
            workers = [report for report in generator.reports if "attention" in report.seconds]
            assert [(w.prompt_tokens, w.shared_tokens) for w in workers] == [(21, 3 * 21)] * stages
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stages", "experts"), [exhaustive((1, 4)), (2, 4), (1, 32)])
def test_replicas_that_share_calls_give_the_same_bits(
    tmp_path: Path, stages: int, experts: int, device: str
) -> None:
    """Of many rows and few, and where one replica has ended before the other. With 32 experts a replica's
    tokens go by rows of the weights, all together would not."""
    path = build_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=6, num_experts=experts)
    config = config_for(path, *layers_on(device, 6, stages, 2), "rule.experts.sockets=2")
    with local_cluster(path, config) as cluster:
        random_adapter(cluster)
        for rows, share in ((48 if experts == 4 else 80, True), (20, False)):
            apart, of_each = replicas_answers(cluster, rows, joined=False)
            together, joined = replicas_answers(cluster, rows, joined=True)
            assert together == apart
            assert (joined < of_each) == share


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3")


def test_the_cache_changes_nothing(model: Path) -> None:
    """Teacher-forced logits of a whole pass have each generated token as their maximum."""
    prompts = random_prompts((4, 11), seed=2)
    config = config_for(model)
    with local_cluster(model, config) as cluster:
        got = answers(cluster, prompts, Sampling(max_new_tokens=NEW))
        rows = [Row([*p, *a], [*p, *a], n) for n, (p, a) in enumerate(zip(prompts, got, strict=True))]
        waves = waves_of(rows, config, cluster.plan)
        report = cluster.run_pass(one_pass(cluster, waves, "eval", logits=True))
        logits = by_row(report.workers[0].logits, waves[0])
        for number, (prompt, answer) in enumerate(zip(prompts, got, strict=True)):
            best = logits[number].argmax(-1).tolist()
            assert best[len(prompt) - 1 : -1] == answer


def test_ends_penalties_and_least_lengths_as_hugging_face(model: Path) -> None:
    prompts = random_prompts((4, 8), seed=3)
    plain = hugging_face(model, prompts, max_new_tokens=8, eos_token_id=None)
    eos = plain[0][3]
    settings = {"max_new_tokens": 12, "min_new_tokens": 6, "repetition_penalty": 1.3}
    with local_cluster(model, config_for(model)) as cluster:
        got = answers(cluster, prompts, Sampling(max_new_tokens=12, eos=(eos,)))
        assert got == hugging_face(model, prompts, max_new_tokens=12, eos_token_id=eos)
        assert len(got[0]) == plain[0].index(eos) + 1
        got = answers(cluster, prompts, Sampling(eos=(eos,), **settings))  # type: ignore[arg-type]
        assert got == hugging_face(model, prompts, eos_token_id=eos, **settings)


def test_the_adapter_is_on_or_off_for_each_request(model: Path) -> None:
    prompts = random_prompts(LENGTHS, seed=5)
    base = hugging_face(model, prompts, max_new_tokens=NEW, eos_token_id=None)
    with local_cluster(model, config_for(model, *TWO)) as cluster:
        random_adapter(cluster)
        sampling = Sampling(max_new_tokens=NEW)
        tuned = answers(cluster, prompts, sampling)
        assert all(a != b for a, b in zip(tuned, base, strict=True))
        with Generator(cluster) as both:
            asked = [
                (both.submit(Request(p, sampling)), both.submit(Request(p, sampling, adapter=False)))
                for p in prompts
            ]
            assert [(a.result(60).tokens, b.result(60).tokens) for a, b in asked] == list(
                zip(tuned, base, strict=True)
            )


def test_a_cluster_trains_and_generates_in_turn(model: Path) -> None:
    """Sessions leave nothing behind: adapters on, mailboxes empty, the next step's loss the same."""
    prompts, sampling = random_prompts((5, 3)), Sampling(max_new_tokens=4)
    config = config_for(model)
    with local_cluster(model, config) as cluster:
        straight = steps(cluster, config, [random_rows(8)], 2)
    with local_cluster(model, config) as cluster:
        answers(cluster, prompts, sampling, adapter=False)
        first = steps(cluster, config, [random_rows(8)], 2, stop=1)
        answers(cluster, prompts, sampling)
        assert first + steps(cluster, config, [random_rows(8)], 2, first=1) == straight


def test_cancelled_closed_and_streamed(model: Path) -> None:
    prompt = random_prompts((4,))[0]
    with local_cluster(model, config_for(model)) as cluster:
        with Generator(cluster, max_rows=1) as generator:
            long = generator.submit(Request(prompt, Sampling(max_new_tokens=100_000)))
            waiting = generator.submit(Request(prompt, Sampling(max_new_tokens=3)))
            seen = 0
            for piece in long:
                seen += piece.token.token >= 0
                if seen == 5:
                    long.cancel()
            assert long.finish == "cancelled" and seen == len(long.tokens)
            assert waiting.result(60).tokens == long.tokens[:3]
            left = generator.submit(Request(prompt, Sampling(max_new_tokens=100_000)))
        assert left.finish in ("cancelled", "error")
        with pytest.raises(UserError, match="closed"):
            generator.submit(Request(prompt))


def random_adapter(cluster: ActorCluster) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float32) * 0.3
        for name, value in cluster.parameters().items()
    }
    cluster.set_parameters(values)


def test_what_is_wrong_with_a_request_ends_that_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts((4, 6))
    choose = RowSampler.next

    def fails_for_seed_7(self: RowSampler, logits: torch.Tensor) -> Token:
        if self.request.sampling.seed == 7 and len(self.tokens) == 2:
            raise ValueError("no such setting")
        return choose(self, logits)

    monkeypatch.setattr(RowSampler, "next", fails_for_seed_7)
    with local_cluster(model, config_for(model)) as cluster:
        expected = answers(cluster, prompts[:1], Sampling(max_new_tokens=NEW))[0]
        with Generator(cluster, cache_tokens=60) as generator:
            good = generator.submit(Request(prompts[0], Sampling(max_new_tokens=NEW)))
            bad = generator.submit(Request(prompts[1], Sampling(max_new_tokens=NEW, temperature=1.0, seed=7)))
            for ids, found in (((5, 96), "found 96"), ((-1, 5), "found -1")):
                with pytest.raises(UserError, match=rf"token id .*{found}; required 0 to 95"):
                    generator.submit(Request(ids))
            with pytest.raises(UserError, match=r"longer than the key-value caches.* at most 60"):
                generator.submit(Request(prompts[0], Sampling(max_new_tokens=57)))
            assert good.result(60).tokens == expected
            assert bad.result(60).finish == "error" and len(bad.tokens) == 2
            assert bad.error == "ValueError: no such setting"


def test_an_error_in_an_actor_ends_the_session_but_not_the_cluster(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_ray.experts import LocalExperts

    prompts, sampling = random_prompts(LENGTHS), Sampling(max_new_tokens=NEW)
    forward = LocalExperts.forward
    calls = []

    def breaks(self: LocalExperts, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 20:
            raise RuntimeError("the engine is broken")
        return forward(self, *args, **options)

    with local_cluster(model, config_for(model, *TWO)) as cluster:
        random_adapter(cluster)
        expected = answers(cluster, prompts, sampling)
        monkeypatch.setattr(LocalExperts, "forward", breaks)
        with Generator(cluster) as generator:
            asked = [generator.submit(Request(p, sampling, adapter=n % 2 > 0)) for n, p in enumerate(prompts)]
            for answer in asked:
                with pytest.raises(RuntimeError, match="engine is broken"):
                    answer.result(60)
                assert answer.finish == "error" and "engine is broken" in answer.error
            with pytest.raises(RuntimeError, match="engine is broken"):
                for _ in asked[0]:
                    pass
            with pytest.raises(
                UserError, match=r"has ended with an error.*engine is broken.*another generator"
            ):
                generator.submit(Request(prompts[0]))
        assert answers(cluster, prompts, sampling) == expected


class Coordinator:
    """A cluster of one coordinator whose session runs until it is told to stop; every request gets three
    tokens. `breaks`: its tokens cannot be fetched any more."""

    coordinators: ClassVar = [0]
    vocab_size = 100

    def __init__(self) -> None:
        self.orders: list[tuple[str, int]] = []
        self.asked: list[tuple[int, int, tuple[int, ...]]] = []  # coordinator, number, prompt
        self.breaks = False
        self._tokens: queue.SimpleQueue[list[Token]] = queue.SimpleQueue()
        self._over = threading.Event()

    def generate(self, spec: SessionSpec, opened: Callable[[], None]) -> list[Any]:
        opened()
        assert self._over.wait(60)
        return []

    def instruct(
        self, rank: int, kind: str, session: int, number: int = -1, requests: Sequence[Request] = ()
    ) -> None:
        self.orders.append((kind, number))
        for own, request in enumerate(requests, number):
            self.asked.append((rank, own, request.prompt))
            if not self.breaks:
                self._tokens.put([Token(own, n, finish="length" if n == 2 else "") for n in range(3)])
        if kind == "stop":
            self._over.set()

    def tokens(self, rank: int, timeout: float) -> tuple[list[Token], bool]:
        if self.breaks:
            raise OSError("the connection is gone")
        if self._over.is_set():
            return [], False
        try:
            return self._tokens.get(timeout=0.02), True
        except queue.Empty:
            return [], True


def test_requests_with_one_prompt_go_to_one_replica_as_many_as_it_runs() -> None:
    cluster = Coordinator()
    cluster.coordinators = [0, 7]  # type: ignore[misc]
    prompts = [(1,), (2,), (1,), (1,), (1,), (2,)]
    with Generator(cluster, max_rows=3) as generator:
        answers = generator.submit_all([Request(prompt) for prompt in prompts])
        assert [answer.request.prompt for answer in answers] == prompts
        assert sorted(answer.number for answer in answers) == list(range(6))
        numbers = {answer.number: answer.request.prompt for answer in answers}
        assert all(numbers[number] == prompt for _, number, prompt in cluster.asked)
        places = [(rank, prompt) for rank, _, prompt in cluster.asked]
        assert places == [*[(0, (1,))] * 3, *[(7, (1,))], *[(7, (2,))] * 2]
        assert cluster.orders == [("request", 0), ("request", 3)]
        for answer in answers:
            answer.result(20)


@pytest.mark.parametrize(("pad", "used"), [(None, 0), (99, 99), (100, 0)])
def test_padding_is_a_token_of_the_model(pad: int | None, used: int) -> None:
    """Some tokenizers have a token for padding behind the embedding's last one."""
    with Generator(Coordinator(), SimpleNamespace(pad_token_id=pad)) as generator:
        assert generator.spec.pad_id == used


@pytest.mark.parametrize("at", [1, 3], ids=["first", "last"])
def test_a_listener_that_fails_ends_its_answer_and_no_other(at: int) -> None:
    heard: list[Any] = []

    def fails(piece: Any) -> None:
        heard.append(piece)
        if len(heard) == at:
            raise RuntimeError("the event loop is closed")

    cluster = Coordinator()
    with Generator(cluster) as generator:
        bad = generator.submit(Request((1, 2)), fails).result(20)
        assert generator.submit(Request((1, 2))).result(20).tokens == [0, 1, 2]  # tokens are still fetched
    assert (bad.finish, bad.error) == (
        ("error", "RuntimeError: the event loop is closed") if at == 1 else ("length", "")
    )
    assert sum(bool(piece.token.finish) for piece in heard) == 1  # its end is told once
    assert cluster.orders.count(("cancel", 0)) == (at == 1)


def test_a_session_whose_tokens_cannot_be_fetched_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.generate.generator._NOTICE", 0.05)
    cluster = Coordinator()
    generator = Generator(cluster)
    cluster.breaks = True
    with pytest.raises(OSError, match="connection is gone"):
        generator.submit(Request((1, 2)), lambda piece: None).result(20)
    closing = threading.Thread(target=generator.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and ("stop", -1) in cluster.orders
    assert isinstance(generator.error, OSError)


def test_streamed_layers_come_ahead_though_a_pass_broke_off(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "olmoe")
    with local_cluster(path, config_for(path, "rule.device=cpu", "rule.resident_layers=0")) as cluster:
        slots = cluster.handles[0].actor.stage.streamed.slots  # type: ignore[attr-defined]
        slots.begin(wraps=False)
        slots.bring(1)
        slots.hold(1)  # as a pass that ends between its recomputation and its backward
        answers(cluster, random_prompts((5,)), Sampling(max_new_tokens=2))
        assert not slots._held and slots._wraps
