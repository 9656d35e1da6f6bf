"""rollouts.jsonl of a run that is resumed."""

from __future__ import annotations

from pathlib import Path

from kt_ray.runs.policy_rollouts import keep_before


def test_a_resumed_run_replaces_the_rounds_that_it_draws_again(tmp_path: Path) -> None:
    log = tmp_path / "rollouts.jsonl"
    keep_before(4, log)
    assert not log.exists()
    kept = '{"step": 0, "prompt": "a\u2028b"}\n{"step": 2, "prompt": "é"}\n'
    # then a round that was abandoned, and the line in which the process was killed
    log.write_text(kept + '{"step": 4, "prompt": "c"}\n{"step": 3, "prom', encoding="utf-8")
    keep_before(4, log)
    assert log.read_text(encoding="utf-8") == kept
