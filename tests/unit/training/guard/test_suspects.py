"""Wrong results: failure.json names rank, host and tensor, and the next submission excludes the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontier_llm.errors import Problem
from frontier_llm.run import run_dir
from frontier_llm.run.failure import Evidence, Failure, Suspect, read_failure
from frontier_llm.training.guard.cause import Inquiry
from frontier_llm.training.guard.suspects import WrongResults

HOSTS = ["n0", "n0", "n1", "n1", "n2", "n2"]  # hosts of ranks 0 to 5


def wrong(*ranks: int) -> WrongResults:
    suspects = [Suspect(rank, HOSTS[rank], "layers.2.mlp_norm.weight") for rank in ranks]
    return WrongResults([Problem("layers.2.mlp_norm.weight", "ranks differ")], suspects, HOSTS)


def test_failure_names_rank_host_and_tensor_and_the_host_is_excluded(tmp_path: Path) -> None:
    inquiry = Inquiry(
        None, 0, 6, tmp_path, lambda what: Failure(what, Evidence.SYMPTOM, rank=0, host="n0", step=17, section="train")
    )
    inquiry.accuse(wrong(3))
    record = read_failure(tmp_path)
    assert record is not None and (record.cause, record.rank, record.host, record.step) == (
        "wrong results",
        3,
        "n1",
        17,
    )
    assert record.suspects == (Suspect(3, "n1", "layers.2.mlp_norm.weight"),) and record.excluded_hosts == ("n1",)
    assert run_dir.untrusted_hosts(tmp_path) == run_dir.bad_hosts(tmp_path) == ["n1"]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    Inquiry(
        None, 1, 6, tmp_path, lambda what: Failure(what, Evidence.SYMPTOM, rank=1, host="n0", step=17, section="train")
    ).accuse(wrong(3))
    assert list(tmp_path.iterdir()) == []


class HeartbeatStore:
    """Stand-in for the claims in the store. The first `late` lookups find no claim."""

    def __init__(self, run_dir: Path, late: int = 0) -> None:
        self.run_dir = run_dir
        self.late = late
        self.files_at_claim = []
        self.first = None

    def claim(self, name: str, value: str) -> str:
        self.files_at_claim = sorted(path.name for path in self.run_dir.iterdir())
        self.first = self.first or value
        return self.first

    def claimed(self, name: str) -> str | None:
        self.late -= 1
        return self.first if self.late < 0 else None


def inquiry(heartbeat_store: HeartbeatStore, rank: int) -> Inquiry:
    return Inquiry(
        heartbeat_store,
        rank,
        6,
        heartbeat_store.run_dir,
        lambda what: Failure(what, Evidence.SYMPTOM, rank=rank, host=HOSTS[rank], step=17, section="train"),
    )  # type: ignore[arg-type]


def test_the_others_leave_when_all_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr("frontier_llm.training.guard.cause.POLL_S", 0.0)
    monkeypatch.setattr("frontier_llm.training.guard.cause.ANSWER_S", 1000.0)
    heartbeat_store = HeartbeatStore(tmp_path, late=5)
    inquiry(heartbeat_store, 0).accuse(wrong(3))
    assert heartbeat_store.files_at_claim == ["failure.json", "untrusted_nodes.json"]
    inquiry(heartbeat_store, 1).accuse(wrong(3))
    assert heartbeat_store.late == -1  # the rank polled until it found the claim


def test_the_others_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontier_llm.training.guard.cause.ANSWER_S", 0.0)
    inquiry(HeartbeatStore(tmp_path), 1).accuse(wrong(3))  # rank 0 makes no claim

    def gone(name: str) -> str:
        raise RuntimeError("Connection reset by peer")

    heartbeat_store = HeartbeatStore(tmp_path)
    monkeypatch.setattr("frontier_llm.training.guard.cause.ANSWER_S", 1000.0)
    monkeypatch.setattr(heartbeat_store, "claimed", gone)
    inquiry(heartbeat_store, 1).accuse(wrong(3))


def test_hosts_that_cannot_be_written_down_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeat_store = HeartbeatStore(tmp_path)
    (tmp_path / "untrusted_nodes.json").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_dir, "untrusted_hosts", lambda _: [])
        inquiry(heartbeat_store, 0).accuse(wrong(3))
    assert "cannot record that n1 must no longer be used" in capsys.readouterr().err
    assert heartbeat_store.first is not None


@pytest.mark.parametrize(("ranks", "excluded"), [((2, 3), ["n1"]), ((0, 2), []), ((0, 1, 2, 3, 4, 5), [])])
def test_no_host_is_excluded_when_most_are_suspects(ranks: tuple[int, ...], excluded: list[str]) -> None:
    assert wrong(*ranks).hosts_to_exclude == excluded


def test_a_run_on_one_host_excludes_it() -> None:
    assert WrongResults(
        [Problem("", "")], [Suspect(0, "n7", "w"), Suspect(1, "n7", "w")], ["n7", "n7"]
    ).hosts_to_exclude == ["n7"]


def test_a_disk_that_fails_does_not_hide_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inquiry = Inquiry(
        None,
        0,
        1,
        tmp_path / "gone",
        lambda what: Failure(what, Evidence.SYMPTOM, rank=0, host="n0", step=1, section="train"),
    )
    assert inquiry.explain(ValueError("boom")).what == "ValueError: boom"
    assert "cannot write failure.json" in capsys.readouterr().err
