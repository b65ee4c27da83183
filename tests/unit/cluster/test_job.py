from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.cluster.job import split_flags, too_slow
from frontier_llm.cluster.sites import load_site
from frontier_llm.errors import FrontierError


def test_flags_of_train_may_stand_anywhere_after_the_run_file() -> None:
    words = ["run.yaml", "train.steps=8", "--allow-change", "train.steps", "--strict", "batch.micro_batch=1", "--allow-change=model"]
    assert split_flags(words) == (
        ("run.yaml", "train.steps=8", "batch.micro_batch=1"),
        ("--allow-change", "train.steps", "--strict", "--allow-change=model"),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run.yaml", "--alow-change", "x"], "--allow-change"),
        (["run.yaml", "--allow-change"], "needs the name"),
        (["--strict"], "no run file"),
    ],
)
def test_other_flags_are_refused_before_any_rank_starts(words: list[str], expected: str) -> None:
    with pytest.raises(FrontierError, match=expected):
        split_flags(words)


@pytest.mark.parametrize(("limit", "left_out"), [(None, []), (2, ["n1"]), (1, ["n1", "n2"])])
def test_a_site_may_leave_out_hosts_that_were_named_slow(tmp_path: Path, limit: int | None, left_out: list[str]) -> None:
    rows = [{"kind": "straggler", "host": host, "step": step, "slowdown": 2.0} for host, step in (("n1", 3), ("n2", 5), ("n1", 9))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    site = load_site("local").model_copy(update={"exclude_slow_after": limit})
    assert too_slow(SimpleNamespace(site=site, directory=tmp_path)) == left_out  # type: ignore[arg-type]
