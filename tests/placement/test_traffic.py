"""Bytes per step against what messages of a given size add up to, and against messages that were sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kt_ray.actors.local_cluster import LocalHandle
from kt_ray.errors import UserError
from kt_ray.placement.expert_load import touched
from kt_ray.placement.traffic import Link, traffic, traffic_notes
from kt_ray.placement.transports import Transport
from kt_ray.train.reports import PassReport
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, one_pass, plan_for, waves_of
from tests.transport.test_links import FarPort, far_cluster


@pytest.mark.parametrize(
    ("far", "answers"), [((), "float32"), ((1,), "float32"), ((0, 1), "float32"), ((1,), "bfloat16")]
)
def test_the_sums_are_those_of_the_messages_sent(tmp_path: Path, far: tuple[int, ...], answers: str) -> None:
    """All tokens for near actors, and exactly the routed rows, whose number is expected, for far ones."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    layout = ("rule=cpu_1worker_1socket", "rule.experts.sockets=2", f"rule.experts.answers={answers}")
    config = config_for(path, *layout)
    rows = random_rows(8, seed=1)
    tokens = sum(len(row.ids) for row in rows)
    with far_cluster(path, config, [("experts", rank) for rank in far]) as (cluster, port):
        report = cluster.run_pass(one_pass(cluster, waves_of(rows, config, cluster.plan)))
        assert isinstance(report, PassReport)
        assert all(isinstance(handle, LocalHandle) for handle in cluster.handles)
        plan = cluster.plan
    plan = replace(plan, dtype="float32")
    moved = traffic(plan, far=far, tokens=tokens)
    for link in moved.experts:
        for name, direction, back in [
            ("forward_there", "forward", False),
            ("forward_back", "forward", True),
            ("backward_there", "backward", False),
            ("backward_back", "backward", True),
        ]:
            observed, count = _sent(port, link, direction, back)
            # Per row exact; the number of rows is expected, not known.
            assert observed / count == pytest.approx(getattr(link, name) / link.tokens)
            assert count == (tokens if not link.far else pytest.approx(link.tokens, rel=0.25))
    assert moved.to_experts(far=True) + moved.to_experts(far=False) == sum(x.bytes for x in moved.experts)


def test_the_share_of_tokens_of_an_actor() -> None:
    assert touched(256, 256, 8) == 1.0
    assert touched(256, 0, 8) == 0.0
    assert touched(4, 1, 1) == 0.25
    assert touched(256, 64, 8) == pytest.approx(1 - 0.75**8)


def test_stages_and_transports_in_the_plan(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    plan = plan_for(path, config_for(path, "rule.device=cpu", "rule.stages=2", "model.dtype=bfloat16"))
    tokens, hidden = plan.tokens_per_step, plan.dims.hidden_size
    assert traffic(plan).stages == (2 * tokens * hidden * 2,)
    assert traffic(plan).to_experts(far=True) == 0 and traffic_notes(plan) == []
    forced = plan_for(path, config_for(path, "rule.device=cpu", "rule.transport=gloo"))
    assert forced.transport == Transport("gloo", "gloo")
    assert traffic(forced).to_experts(far=False) == 0 and "(gloo)" in traffic_notes(forced)[0]
    assert "rule.transport=gloo changes nothing with cluster=local" in forced.notes
    under_ray = plan_for(path, config_for(path, "cluster=ray", "rule.device=cpu", "rule.transport=gloo"))
    assert any("(gloo)" in note for note in under_ray.notes)


def test_shared_memory_alone_is_refused_for_several_nodes(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    one = plan_for(path, config_for(path, "rule.device=cpu", "rule.transport=arena"))
    assert one.transport == Transport("arena", "")
    with pytest.raises(UserError, match="cannot carry tensors between nodes"):
        plan_for(path, config_for(path, "rule.device=cpu", "rule.transport=arena", "rule.nodes=2"))
    two = plan_for(
        path, config_for(path, "cluster=ray", "rule.device=cpu", "rule.nodes=2", "rule.experts.sockets=1")
    )
    links = traffic(two).experts
    assert {link.actor: link.far for link in links} == {0: False, 1: True}
    share = touched(
        two.dims.num_experts, len(two.experts[1].experts_of(links[0].layer)), two.dims.experts_per_token
    )
    assert all(link.tokens == pytest.approx(share * two.tokens_per_step) for link in links if link.far)


def _sent(port: FarPort, link: Link, direction: str, back: bool) -> tuple[int, int]:
    """Bytes and rows of all groups' messages of a link, one way."""
    if back:
        replies = [m for _, m in port.sent if m.tag[:2] == ("reply", direction)]
        found = [m for m in replies if m.tag[3] == link.layer and m.tag[5] == link.actor]
    else:
        found = [m for to, m in port.sent if m.tag[0] == direction and to == ("experts", link.actor)]
        found = [m for m in found if m.tag[2] == link.layer]
    assert found
    size = sum(t.numel() * t.element_size() for m in found for t in m.tensors.values())
    return size, sum(next(iter(m.tensors.values())).shape[0] for m in found)
