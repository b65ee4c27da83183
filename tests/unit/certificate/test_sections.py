"""Each section of a certificate passes a correct run and refuses planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.certificate import communication, installation
from frontier_llm.certificate.certificate import certify
from frontier_llm.certificate.section import CertificateSection, SectionVerdict
from frontier_llm.certificate.subject import Subject
from frontier_llm.cluster import disk
from frontier_llm.cluster.admission import with_prediction
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.submit import JobRequest, wanted_job
from frontier_llm.config import load_run
from frontier_llm.machine.precision import resolve_precision
from frontier_llm.run.installation import Installation, TorchFacts
from frontier_llm.schedule import Action, Kind, Schedule, build
from frontier_llm.topology import streams

ELSEWHERE = "this is no login node of the site"


def on_frontier(*settings: str, run: str = "train_22b", nodes: int = 16, **request: object) -> Subject:
    """Return a run on Frontier's nodes, examined from another computer."""
    site = load_site("frontier")
    config = resolve_precision(load_run(run, [f"machine={site.machine}", "batch.global_batch=128", *settings]))
    of_job = {name: request.pop(name) for name in ("spares", "max_node_hours") if name in request}
    job = wanted_job(config, site, nodes, **{"continuation": "never", **of_job})
    wanted = JobRequest(job=job, config=config, site=site, **{"account": "ABC123", **request})
    ranks = nodes * site.tasks_per_node
    return Subject(config=config, world_size=ranks, request=with_prediction(wanted), elsewhere=ELSEWHERE)


def here(tmp_path: Path, *settings: str) -> Subject:
    """Return a small run on four ranks of this computer."""
    words = ["data.train=synthetic", "data.validation=null", "data.tokenizer=null", "train.tensorboard=false"]
    config = resolve_precision(load_run("quickstart", [*words, f"train.run_dir={tmp_path / 'run'}", *settings]))
    return Subject(config=config, world_size=4)


def section(subject: Subject, name: str) -> CertificateSection:
    (found,) = certify(subject, [name]).sections
    return found


def refused(subject: Subject, name: str) -> str:
    """Return the problems of a section that must be refused."""
    found = section(subject, name)
    assert found.verdict is SectionVerdict.REFUSED, found
    return "\n".join(map(str, found.problems))


def test_a_correct_run_passes_all_sections_that_can_be_checked() -> None:
    certificate = certify(on_frontier(), ["configuration", "communication", "restart", "memory", "cost"])
    assert [each.verdict for each in certificate.sections] == [SectionVerdict.PASSED] * 5, certificate.problems
    assert all(each.evidence for each in certificate.sections)


# ------------------------------------------------------------------------------------------------------ installation


def facts(**changes: object) -> Installation:
    torch = TorchFacts(version="2.10.0", hip="", cuda="", path="", error="")
    known = {
        "host": "n1",
        "executable": "python",
        "python": "3.11",
        "missing_modules": (),
        "package": "frontier_llm",
        "package_digest": "",
        "torch": torch,
        "libraries": {},
        "kernels": None,
        "providers": {},
    }
    return Installation(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"missing_modules": ("yaml",)}, "has no yaml"),
        ({"libraries": {"store.so": "store.so is missing"}}, "is missing"),
        ({"torch": TorchFacts(version="", hip="", cuda="", path="", error="no module")}, "cannot import torch"),
    ],
)
def test_an_incomplete_installation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(installation, "of_this_interpreter", lambda *arguments: facts())
    assert section(here(tmp_path), "installation").verdict is SectionVerdict.PASSED
    monkeypatch.setattr(installation, "of_this_interpreter", lambda *arguments: facts(**changes))
    assert words in refused(here(tmp_path), "installation")


def test_the_installation_of_another_computer_is_not_checkable_here() -> None:
    found = section(on_frontier(), "installation")
    assert found.verdict is SectionVerdict.NOT_CHECKABLE and ELSEWHERE in found.why


# ----------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallel.pipeline=3"], "cannot be divided into replicas"),
        (["model.kv_heads=5"], "model.kv_heads"),
        (["train.observers=[wand]"], "did you mean 'wandb'"),
        (["train.keep_best=validation/x"], "is not a held-out set"),
        (["comm.algorithms=nowhere"], "comm.algorithms"),
        (["precision.dtype=fp32", "model.score_softcap=50.0"], "no fused attention on a GPU supports fp32"),
    ],
)
def test_a_faulty_configuration_is_refused(settings: list[str], words: str) -> None:
    assert words in refused(on_frontier(*settings), "configuration")


def test_data_that_are_missing_are_refused_here_and_open_elsewhere(tmp_path: Path) -> None:
    missing = f"data.train=[{{path: {tmp_path}/none}}]"
    assert "no such file" in refused(here(tmp_path, missing), "configuration")
    found = section(on_frontier(missing), "configuration")
    assert found.verdict is SectionVerdict.NOT_CHECKABLE and "no such file" in found.why


def test_sections_that_need_a_layout_are_open_without_one() -> None:
    found = section(on_frontier("parallel.pipeline=3"), "memory")
    assert found.verdict is SectionVerdict.NOT_CHECKABLE and "configuration" in found.why


# ----------------------------------------------------------------------------------------------------- communication


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = [actions if stage == rank else listed for stage, listed in enumerate(schedule.actions)]
    return replace(schedule, actions=tuple(map(tuple, lists)))


def crossed_pair(schedule: Schedule) -> Schedule:
    """Exchange a send of rank 0 with the receive of its answer, so that both ranks wait for each other."""
    actions = list(schedule.actions[0])
    send = next(index for index, action in enumerate(actions) if action.kind is Kind.SEND_FORWARD)
    answer = next(index for index, action in enumerate(actions) if action == Action(Kind.RECV_BACKWARD, 0, 0))
    actions.insert(send, actions.pop(answer))
    return changed(schedule, 0, actions)


def exchanged_messages(schedule: Schedule) -> Schedule:
    """Let rank 1 receive its second message before its first."""
    actions = list(schedule.actions[1])
    first = next(index for index, action in enumerate(actions) if action.kind is Kind.RECV_FORWARD)
    second = actions.index(actions[first]._replace(microbatch=1))
    actions.insert(first, actions.pop(second))
    return changed(schedule, 1, actions)


def dropped_receive(schedule: Schedule) -> Schedule:
    actions = list(schedule.actions[1])
    actions.remove(next(action for action in actions if action.kind is Kind.RECV_FORWARD))
    return changed(schedule, 1, actions)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
@pytest.mark.parametrize(
    ("fault", "mode", "words"),
    [
        (dropped_receive, "one", "is missing"),
        (dropped_receive, "many", "is missing"),
        # this is a fault only with one communication in flight: with many, an early receive blocks nothing
        (crossed_pair, "one", "deadlock"),
        (exchanged_messages, "one", ""),
        (exchanged_messages, "many", ""),
    ],
)
def test_messages_that_do_not_pair_up_are_refused(
    fault: Callable[[Schedule], Schedule], mode: str, words: str, name: str
) -> None:
    schedule = build(name, 3, 6, 2 if name == "interleaved" else 1)
    assert communication.order_problems(schedule, mode, overlap=False) == []
    problems = communication.order_problems(fault(schedule), mode, overlap=False)
    assert problems and words in str(problems[0])


def test_one_queue_too_few_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = on_frontier("comm.in_flight=many")
    plan = subject.plan
    needed = streams.most_streams(subject.config, plan.grid, plan.placement, 8)
    monkeypatch.setattr(streams, "MOST_QUEUES", needed)
    assert section(subject, "communication").verdict is SectionVerdict.PASSED
    monkeypatch.setattr(streams, "MOST_QUEUES", needed - 1)
    assert f"each of the {needed} streams of a rank" in refused(subject, "communication")


# ----------------------------------------------------------------------------------------------------------- restart


def test_work_that_a_restart_would_lose_is_refused() -> None:
    text = refused(on_frontier("train.steps=30"), "restart")
    assert "no checkpoint is written in 30 steps" in text
    assert "is too short" in refused(on_frontier(minutes=2), "restart")


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert section(here(tmp_path), "restart").verdict is SectionVerdict.PASSED
    full = SimpleNamespace(f_bavail=1, f_frsize=4096, f_favail=10**6, f_files=10**6)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: full)
    assert "4.0 KiB" in refused(here(tmp_path), "restart")


def test_the_cost_of_a_failure_follows_the_save_interval() -> None:
    saves = ["train.save_final=true", "train.steps=300", "data.allow_synthetic=true"]
    often, seldom = (section(on_frontier(*saves, f"train.save_interval={n}"), "restart").evidence for n in (10, 100))
    assert "at most 10 steps" in often[0] and "at most 100 steps" in seldom[0]


# -------------------------------------------------------------------------------------------------- memory and cost


def test_memory_above_the_device_is_refused_and_parts_are_listed() -> None:
    small = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence_parallel=false", "batch.micro_batch=1"]
    subject = on_frontier(*small)
    text = refused(subject, "memory")
    assert "GiB per device are needed" in text
    evidence = section(subject, "memory").evidence
    assert "weights" in evidence[1] and any("more room" in line for line in evidence)


def test_jobs_that_the_site_refuses_and_budgets_without_a_step_are_refused() -> None:
    assert "charges every job to a project" in refused(on_frontier(account=None), "cost")
    assert "allows at most" in refused(on_frontier(minutes=10_000), "cost")
    assert "node-hours are too few" in refused(on_frontier(max_node_hours=1.0), "cost")
    assert "on synthetic data take about" in refused(on_frontier("train.steps=2000"), "cost")
