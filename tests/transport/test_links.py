"""Only the routed rows travel to actors that do not share memory, and nothing changes by it, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.transport.links import ExpertLink
from kt_ray.transport.messages import Address, Lease, LocalPort, Mailbox, Message
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, plan_for, steps, waves_of

BATCHES = [random_rows(8, seed=s) for s in range(2)]


class FarPort(LocalPort):
    """Pretends that peers in `far` are out of shared memory's reach; remembers what it sent."""

    def __init__(self, deliver, far) -> None:  # type: ignore[no-untyped-def]
        super().__init__(deliver)
        self.far = far
        self.sent: list[tuple[Address, Message]] = []

    def shares(self, address: Address) -> bool:
        return address not in self.far

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        self.sent += [(address, message) for address in to]
        return super().send(to, message)


@contextmanager
def far_cluster(
    path: Path, config: Config, far: Sequence[Address] | None = None
) -> Iterator[tuple[LocalCluster, FarPort]]:
    """A local cluster whose workers believe the actors `far` (None = all) to be on other nodes."""
    plan = plan_for(path, config)
    cluster = LocalCluster(plan, actor_specs(plan, config, str(path)))
    try:
        cluster.start()
        local = [h for h in cluster.handles if isinstance(h, LocalHandle)]
        everyone = [h.address for h in local]
        port = FarPort({h.address: h.actor.deliver for h in local}, everyone if far is None else far)
        for handle in local:
            handle.actor.port = port
        yield cluster, port
    finally:
        cluster.shutdown()


LAYOUTS = [
    ["rule=cpu_1worker_1socket"],
    ["rule=cpu_1worker_1socket", "rule.experts.sockets=4", "rule.groups=2", "trainer.micro_batch_size=1"],
    ["rule.device=cpu", "rule.stages=2", "rule.replicas=2", "rule.experts.sockets=2", "rule.groups=2"],
]


@pytest.mark.parametrize(
    ("family", "layout"), [*(("deepseek_v3", layout) for layout in LAYOUTS), ("mixtral", LAYOUTS[1])]
)
def test_losses_and_gradients_are_those_of_sending_all(
    tmp_path: Path, family: str, layout: list[str]
) -> None:
    path = build_checkpoint(tmp_path, family)
    config = config_for(path, *layout, "optim.lr=0.02", "lora.dropout=0.1")
    with local_cluster(path, config) as near:
        losses = steps(near, config, BATCHES, 2)
        near.run_pass(one_pass(near, waves_of(BATCHES[0], config, near.plan), number=99, step=2))
        gradients = near.gradients()
    with far_cluster(path, config) as (far, port):
        assert steps(far, config, BATCHES, 2) == losses
        far.run_pass(one_pass(far, waves_of(BATCHES[0], config, far.plan), number=99, step=2))
        found = far.gradients()
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name
    if len(far.plan.experts) > 1:
        assert _rows(port, far=True) < _rows(port, far=False) * len(far.plan.experts)


def test_near_actors_read_all_and_far_ones_get_their_rows(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *LAYOUTS[1], "optim.lr=0.02")
    with local_cluster(path, config) as near:
        losses = steps(near, config, BATCHES, 2)
    far = [("experts", 1), ("experts", 3)]
    with far_cluster(path, config, far) as (cluster, port):
        assert steps(cluster, config, BATCHES, 2) == losses
        plan = cluster.plan
    sent = [(to, m) for to, m in port.sent if to[0] == "experts" and m.tag[0] == "forward"]
    for to, message in sent:
        held = torch.tensor(plan.experts[to[1]].experts)
        routed = torch.isin(message.tensors["ids"], held).any(dim=1)
        assert bool(routed.all()) or to not in far
    whole = {m.tag: m.tensors["x"].data_ptr() for to, m in sent if to == ("experts", 0)}
    assert all(m.tensors["x"].data_ptr() == whole[m.tag] for to, m in sent if to == ("experts", 2))
    assert any(m.tensors["x"].data_ptr() != whole[m.tag] for to, m in sent if to in far)


def _rows(port: FarPort, *, far: bool) -> int:
    """Rows of requests sent, or (far=False) of the groups' tokens as the answers' sums have them."""
    forward = [m for to, m in port.sent if to[0] == "experts" and m.tag[0] == "forward"]
    if far:
        return sum(m.tensors["x"].shape[0] for m in forward)
    keys: dict[object, set[int]] = {}
    for m in forward:
        keys.setdefault(m.tag, set()).update(m.tensors["keys"].tolist())
    return sum(len(found) for found in keys.values())


def test_an_actor_without_a_row_still_gets_its_message() -> None:
    sent: list[tuple[Address, Message]] = []
    mailbox = Mailbox("test")
    addresses: list[Address] = [("experts", 0), ("experts", 1)]
    port = FarPort({a: lambda m, a=a: sent.append((a, m)) for a in addresses}, addresses)
    exchange = ExpertLink(
        mailbox,
        port,
        replica=0,
        experts=range(2),
        number=7,
        experts_of=lambda layer, rank: (2 * rank, 2 * rank + 1),
        num_experts=4,
    )
    x, ids = torch.randn(3, 8), torch.tensor([[0, 1], [1, 4], [4, 4]], dtype=torch.int32)
    weights, keys = torch.rand(3, 2), torch.arange(3)
    exchange.submit_forward(5, 0, x, ids, weights, keys, True)
    assert [(to, m.tag, m.tensors["x"].shape[0]) for to, m in sent] == [
        (("experts", 0), ("forward", 7, 5, 0, 0), 2),
        (("experts", 1), ("forward", 7, 5, 0, 0), 0),
    ]
    y = torch.randn(2, 8)
    mailbox.put(Message(("reply", "forward", 7, 5, 0, 1), {"y": torch.empty(0, 8)}))
    mailbox.put(Message(("reply", "forward", 7, 5, 0, 0), {"y": y}))
    assert torch.equal(exchange.join_forward(5, 0), torch.cat([y, torch.zeros(1, 8)]))
    sent.clear()
    dy = torch.randn(3, 8)
    exchange.submit_backward(5, 0, dy)
    assert torch.equal(sent[0][1].tensors["dy"], dy[:2]) and sent[1][1].tensors["dy"].shape == (0, 8)
    mailbox.put(Message(("reply", "backward", 7, 5, 0, 0), {"dx": dy[:2], "dw": weights[:2]}))
    mailbox.put(Message(("reply", "backward", 7, 5, 0, 1), {"dx": dy[:0], "dw": weights[:0]}))
    dx, dw = exchange.join_backward(5, 0)
    assert torch.equal(dx, torch.cat([dy[:2], torch.zeros(1, 8)]))
    assert torch.equal(dw, torch.cat([weights[:2], torch.zeros(1, 2)]))
    assert dx.data_ptr() != dy.data_ptr()


class Ready(threading.Event):
    """An event of a device."""

    def synchronize(self) -> None:
        assert self.wait(60)


def link(port: LocalPort, mailbox: Mailbox, *, later: bool = True) -> ExpertLink:
    return ExpertLink(
        mailbox,
        port,
        replica=0,
        experts=range(1),
        number=7,
        experts_of=lambda layer, rank: (0, 1, 2, 3),
        num_experts=4,
        later=later,
    )


def test_what_is_on_its_way_to_the_host_is_sent_later_in_order() -> None:
    """The worker goes on at once; rows for far actors are chosen by ids that are there by then."""
    sent: list[Message] = []
    mailbox, actor = Mailbox("test"), ("experts", 0)
    exchange = link(FarPort({actor: sent.append}, [actor]), mailbox)
    ids = torch.full((3, 2), 4, dtype=torch.int32)
    first, second = Ready(), Ready()
    for group, ready in enumerate((first, second)):
        exchange.after(ready)
        tokens = torch.zeros(3, 8), ids, torch.rand(3, 2), torch.arange(3)
        exchange.submit_forward(5, group, *tokens, True)
    second.set()
    assert not sent
    ids[1] = 2
    first.set()
    mailbox.put(Message(("reply", "forward", 7, 5, 1, 0), {"y": torch.ones(1, 8)}))
    assert exchange.join_forward(5, 1).sum(dim=1).tolist() == [0, 8, 0]
    assert [(m.tag, len(m.tensors["x"])) for m in sent] == [
        (("forward", 7, 5, 0, 0), 1),
        (("forward", 7, 5, 1, 0), 1),
    ]
    exchange.close()
    exchange.close()


def test_a_single_token_waits_for_its_copy() -> None:
    sent: list[Message] = []
    exchange = link(LocalPort({("experts", 0): sent.append}), Mailbox("test"), later=False)
    ready = Ready()
    threading.Timer(0.05, ready.set).start()
    exchange.after(ready)
    assert ready.is_set()
    ids = torch.zeros(1, 2, dtype=torch.int32)
    exchange.submit_forward(5, 0, torch.zeros(1, 8), ids, torch.rand(1, 2), torch.arange(1), False)
    assert sent


def test_what_cannot_be_sent_shows_where_it_is_waited_for() -> None:
    def refuse(message: Message) -> None:
        raise OSError("the pipe is gone")

    exchange = link(LocalPort({("experts", 0): refuse}), Mailbox("test"))
    ready = Ready()
    ready.set()
    exchange.after(ready)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    exchange.submit_forward(5, 0, torch.zeros(1, 8), ids, torch.rand(1, 2), torch.arange(1), True)
    with pytest.raises(OSError, match="the pipe is gone"):
        exchange.join_forward(5, 0)


def test_a_pass_that_is_given_up_sends_no_more() -> None:
    sent: list[Message] = []
    exchange = link(LocalPort({("experts", 0): sent.append}), Mailbox("test"))
    ready = Ready()
    ids = torch.zeros(1, 2, dtype=torch.int32)
    for group in range(2):
        exchange.after(ready)
        tokens = torch.zeros(1, 8), ids, torch.rand(1, 2), torch.arange(1)
        exchange.submit_forward(5, group, *tokens, True)
    threading.Timer(0.05, ready.set).start()
    exchange.close()
    assert [m.tag[3] for m in sent] == [0]  # the one under way


def test_workers_say_where_their_experts_are(tmp_path: Path) -> None:
    """The rows come from the plan's experts, not from what an actor happens to be."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *LAYOUTS[1])
    with far_cluster(path, config) as (cluster, port):
        steps(cluster, config, BATCHES, 1)
        (handle,) = cluster.workers
        assert isinstance(handle, LocalHandle) and isinstance(handle.actor, AttentionWorker)
        moe = set(handle.actor.stage.moe_layers)
    tags = {(m.tag[0], m.tag[2]) for to, m in port.sent if to[0] == "experts"}
    assert tags == {(d, layer) for d in ("forward", "backward") for layer in moe}
