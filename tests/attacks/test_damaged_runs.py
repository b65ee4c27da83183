"""A damaged run directory does not hide other runs from `status`, and the damaged file is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import supervisor
from frontier_llm.cluster.batch import BatchRun
from frontier_llm.cluster.sites import load_site
from frontier_llm.cluster.slurm import Allocation
from frontier_llm.cluster.status import find_runs, read_status
from frontier_llm.config import load_run
from frontier_llm.run import run_dir
from frontier_llm.run.complete import MANIFEST, MANIFEST_DIGEST, digest_line, newest_complete
from frontier_llm.run.holder import take
from frontier_llm.run.job import Job
from tests.harness.checkpoints import SHARD, save_only

BINARY = bytes(range(256))
NEWEST = "checkpoints/step_00000030"


def make_run(directory: Path) -> None:
    """Make a run at step 40 of 100, with two earlier starts and each file that `status` reads."""
    directory.mkdir(parents=True)
    rows = [
        {"kind": "step", "step": step, "loss": 3 - step / 100, "tokens_per_s": 1000.0, "step_time_s": 2.0}
        for step in range(1, 41)
    ]
    rows.append({"kind": "communication", "step": 40, "axes": {"tp": {"calls": 9000, "p50_us": 128, "p99_us": 4096}}})
    rows.append({"kind": "straggler", "step": 25, "incarnation": 1, "host": "n7", "slowdown": 1.4})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.yaml").write_text(
        "train: {steps: 100}\nbatch: {global_batch: 8}\nmodel: {sequence_length: 32}\n"
    )
    save_only(directory, 30)
    take(directory, "77", "n0")
    run_dir.record(directory, run_dir.Attempt(1, "77", ("n0",), 0, 30, 1, "crash", "rank 3 on n0 failed first", "n0"))
    run_dir.record(directory, run_dir.Attempt(2, "77", ("n0",), 30, 30, 75, "interrupted"))
    run_dir.add_bad_hosts(directory, ["n5"])
    run_dir.distrust(directory, ["n6"])
    (directory / "successor").write_text("78\n")


def content(name: str, data: bytes | str) -> Callable[[Path], None]:
    """Replace the content of a file."""

    def plant(run: Path) -> None:
        (run / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return plant


def folder_for(name: str) -> Callable[[Path], None]:
    def plant(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()

    return plant


def dangling(name: str) -> Callable[[Path], None]:
    def plant(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to("/nonexistent/file")

    return plant


def fifo(name: str) -> Callable[[Path], None]:
    def plant(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return plant


def line(name: str, row: str) -> Callable[[Path], None]:
    """Append a line to a file."""

    def plant(run: Path) -> None:
        with (run / name).open("a") as file:
            file.write(row + "\n")

    return plant


def manifest(text: str) -> Callable[[Path], None]:
    """Replace the manifest and its digest."""

    def plant(run: Path) -> None:
        (run / NEWEST / MANIFEST).write_text(text)
        (run / NEWEST / MANIFEST_DIGEST).write_bytes(digest_line(text.encode()))

    return plant


def another_job(run: Path) -> None:
    """Write the job record of another run directory."""
    job = {"version": 1, "run_dir": "/elsewhere", "words": ["r"], "site": "s", "nodes": 1, "warning_s": 60}
    rest = {"spares": 0, "continuation": "never", "max_node_hours": None, "preflight": False, "flags": []}
    (run / "job.json").write_text(json.dumps({**job, **rest}))


def attempt(**changes: object) -> str:
    """Return a line of attempts.jsonl with some fields replaced."""
    row = dict.fromkeys(("incarnation", "start_step", "end_step", "exit_code"), 1) | dict.fromkeys(
        ("job_id", "cause", "detail", "failed_host"), ""
    )
    return json.dumps({**row, "nodes": ["n0"], "started_unix_s": 1.0, "ended_unix_s": 2.0, **changes})


# (name, function that damages the run, text that `status` prints about it)
WAYS: list[tuple[str, Callable[[Path], None], str]] = [
    ("empty incarnation", content("incarnation.json", ""), "incarnation.json: is empty"),
    ("truncated incarnation", content("incarnation.json", '{"incarnation": 1, "jo'), "incarnation.json: is not JSON"),
    ("binary incarnation", content("incarnation.json", BINARY), "incarnation.json: is not UTF-8 text"),
    ("list as incarnation", content("incarnation.json", "[1]"), "incarnation.json: holds a list, expected an object"),
    (
        "text as number of starts",
        content("incarnation.json", '{"incarnation": "1"}'),
        "incarnation.json: incarnation is '1'",
    ),
    ("deep incarnation", content("incarnation.json", "[" * 100_000), "incarnation.json: is not JSON"),
    ("folder as incarnation", folder_for("incarnation.json"), "incarnation.json: is a directory, not a file"),
    ("empty bad nodes", content("bad_nodes.json", ""), "bad_nodes.json: is empty"),
    ("number as bad nodes", content("bad_nodes.json", "5"), "bad_nodes.json: holds a number, expected a list"),
    ("numbers as hosts", content("bad_nodes.json", "[5]"), "bad_nodes.json: is not a list of host names"),
    ("binary untrusted nodes", content("untrusted_nodes.json", BINARY), "untrusted_nodes.json: is not UTF-8 text"),
    (
        "null as untrusted nodes",
        content("untrusted_nodes.json", "null"),
        "untrusted_nodes.json: holds null, expected a list",
    ),
    ("binary successor", content("successor", BINARY), "successor: is not UTF-8 text"),
    ("option as successor", content("successor", "--help"), "successor: contains '--help', expected the id of a job"),
    ("folder as successor", folder_for("successor"), "successor: is a directory, not a file"),
    ("empty job", content("job.json", ""), "job.json: is empty"),
    (
        "job of a newer version",
        content("job.json", '{"version": 9}'),
        "job.json: version is 9, but this program reads at most version 4",
    ),
    ("unknown field of a job", content("job.json", '{"version": 1, "x": 1}'), "job.json: x is not a field of a job"),
    ("job of another run", another_job, "job.json: run_dir is /elsewhere, so this is the record of another run"),
    ("folder as job", folder_for("job.json"), "job.json: is a directory, not a file"),
    ("binary config", content("config.yaml", BINARY), "config.yaml: is not UTF-8 text"),
    ("empty config", content("config.yaml", ""), "config.yaml: is empty, but a mapping is expected"),
    ("truncated config", content("config.yaml", "train: {steps: 10"), "config.yaml: cannot read"),
    ("list as section", content("config.yaml", "train: [1]"), "config.yaml: train is [1], not a section"),
    (
        "NaN as steps",
        content("config.yaml", "train: {steps: .nan}"),
        "config.yaml: train.steps has the invalid value nan",
    ),
    (
        "boolean as steps",
        content("config.yaml", "train: {steps: true}"),
        "config.yaml: train.steps has the invalid value True",
    ),
    ("folder as config", folder_for("config.yaml"), "config.yaml: is a directory, not a file"),
    ("link to nowhere as config", dangling("config.yaml"), "config.yaml: is a link to a file that does not exist"),
    ("folder as metrics", folder_for("metrics.jsonl"), "metrics.jsonl: is a directory, not a file"),
    ("link to nowhere as metrics", dangling("metrics.jsonl"), "metrics.jsonl: is a link to a file that does not exist"),
    ("pipe as metrics", fifo("metrics.jsonl"), "metrics.jsonl: is not a regular file"),
    (
        "binary metrics",
        content("metrics.jsonl", BINARY + b"\n"),
        "metrics.jsonl: 2 lines are damaged and ignored, the first is line 1",
    ),
    (
        "NaN as loss",
        line("metrics.jsonl", '{"step": 41, "loss": NaN}'),
        "metrics.jsonl: line 43 is damaged and ignored",
    ),
    (
        "infinite time",
        line("metrics.jsonl", '{"step": 41, "loss": 1, "step_time_s": 1e999}'),
        "metrics.jsonl: line 43 is damaged",
    ),
    ("text as loss", line("metrics.jsonl", '{"step": 41, "loss": "low"}'), "metrics.jsonl: line 43 is damaged"),
    ("boolean as step", line("metrics.jsonl", '{"step": true, "loss": 1}'), "metrics.jsonl: line 43 is damaged"),
    (
        "huge step",
        line("metrics.jsonl", '{"step": ' + "9" * 4000 + ', "loss": 1}'),
        "metrics.jsonl: line 43 is damaged",
    ),
    ("deep line", line("metrics.jsonl", "[" * 100_000), "metrics.jsonl: line 43 is damaged"),
    ("list as kind", line("metrics.jsonl", '{"step": 41, "kind": []}'), "metrics.jsonl: line 43 is damaged"),
    (
        "straggler of no host",
        line("metrics.jsonl", '{"step": 41, "kind": "straggler", "host": []}'),
        "metrics.jsonl: line 43 is damaged",
    ),
    ("text as nodes", line("attempts.jsonl", attempt(nodes=5)), "attempts.jsonl: line 3 is damaged"),
    ("boolean as end", line("attempts.jsonl", attempt(end_step=True)), "attempts.jsonl: line 3 is damaged"),
    ("list as cause", line("attempts.jsonl", attempt(cause=["crash"])), "attempts.jsonl: line 3 is damaged"),
    ("folder as attempts", folder_for("attempts.jsonl"), "attempts.jsonl: is a directory, not a file"),
    ("empty failure", content("failure.json", ""), "failure.json: is not the record of a failure"),
    ("list as failure", content("failure.json", "[]"), "failure.json: is not the record of a failure"),
    ("binary failure", content("failure.json", BINARY), "failure.json: is not UTF-8 text"),
    ("empty manifest", content(f"{NEWEST}/{MANIFEST}", ""), f"{NEWEST}/{MANIFEST}: sha256 is"),
    ("null as manifest", manifest("null"), f"{NEWEST}/{MANIFEST}: is not a manifest"),
    ("list as progress", manifest('{"progress": [], "shards": []}'), f"{NEWEST}/{MANIFEST}: is not a manifest"),
    ("another step", manifest('{"progress": {"step": 31}, "shards": []}'), f"{NEWEST}/{MANIFEST}: belongs to step 31"),
    (
        "boolean as step of manifest",
        manifest('{"progress": {"step": true}, "shards": []}'),
        f"{NEWEST}/{MANIFEST}: belongs to step True",
    ),
    (
        "no manifest",
        lambda run: (run / NEWEST / MANIFEST).unlink(),
        f"{NEWEST}/{MANIFEST}: cannot be read: No such file",
    ),
    ("no shard", lambda run: (run / NEWEST / SHARD).unlink(), f"{NEWEST}/{SHARD}: is missing"),
    ("truncated shard", content(f"{NEWEST}/{SHARD}", ""), f"{NEWEST}/{SHARD}: has 0 bytes, but the manifest records 7"),
    ("folder as shard", folder_for(f"{NEWEST}/{SHARD}"), f"{NEWEST}/{SHARD}: is not a regular file"),
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs on a machine without Slurm: `a` is intact, `b` is damaged by the test."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b")
    return tmp_path / "runs"


@pytest.mark.parametrize(("plant", "said"), [way[1:] for way in WAYS], ids=[way[0] for way in WAYS])
def test_a_damaged_run_is_named_and_hides_no_other(
    plant: Callable[[Path], None], said: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(runs / "b")
    assert main(["status", "runs/a", "runs/b"]) == 0
    sound, damaged = sorted(capsys.readouterr().out.split("\n\n"))
    assert sound.startswith("runs/a ") and "step       40 of 100" in sound and "damaged" not in sound
    assert damaged.startswith("runs/b ") and f"  damaged    {said}" in damaged
    assert main(["status"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("runs/")]
    assert ["damaged" in row for row in sorted(rows)] == [False, True]
    assert main(["status", "--json"]) == 0
    first, second = sorted(json.loads(capsys.readouterr().out), key=lambda row: str(row["run_dir"]))
    assert first["damage"] == [] and len(second["damage"]) == 1


def test_a_file_that_may_not_be_read_is_named(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = os.open

    def refuse(path: object, *arguments: object, **options: object) -> int:
        if str(path) == "runs/b/metrics.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)  # root can read every file, so the refusal is simulated
    assert main(["status", "runs/a", "runs/b"]) == 0
    assert (
        "  damaged    metrics.jsonl: cannot be read: Permission denied" in (text := capsys.readouterr().out)
        and "40 of 100" in text
    )


def test_a_run_of_dangling_links_and_a_missing_one_hide_no_other(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(runs / "b")
    (runs / "b").mkdir()
    dangling("metrics.jsonl")(runs / "b")
    assert main(["status", "runs/a", "runs/b", "elsewhere"]) == 2
    said = capsys.readouterr()
    assert "40 of 100" in said.out and "runs/b" in said.out and "link to a file that does not exist" in said.out
    assert "elsewhere: no such run directory" in said.err


def test_an_unforeseen_fault_of_one_run_hides_no_other(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run_dir.steps
    monkeypatch.setattr(run_dir, "steps", lambda path: steps(path) if path.name == "a" else [][1])
    assert main(["status", "runs/a", "runs/b"]) == 2
    said = capsys.readouterr()
    assert "40 of 100" in said.out and "runs/b: cannot be shown: IndexError: list index out of range" in said.err


def test_a_run_directory_that_is_a_link_is_found(runs: Path) -> None:
    (runs / "b").rename(runs.parent / "scratch")
    (runs / "b").symlink_to(runs.parent / "scratch")
    assert {path.name for path in find_runs(Path("runs"))} == {"a", "b"}


def test_the_newest_complete_checkpoint_does_not_depend_on_latest(runs: Path) -> None:
    checkpoints = runs / "b" / "checkpoints"
    shutil.copytree(runs / "b" / NEWEST, checkpoints / "step_00000040")
    assert newest_complete(checkpoints) == 30  # the copy in step_00000040 has the manifest of step 30
    (checkpoints / "LATEST").write_text("step_00000099\n")
    assert newest_complete(checkpoints) == 30 and run_dir.latest_step(runs / "b") == 30
    shutil.rmtree(runs / "b" / NEWEST)
    assert newest_complete(checkpoints) is None and run_dir.latest_step(runs / "b") == 0
    assert run_dir.end(runs / "b", 99) == ""


def test_a_damaged_record_of_the_start_does_not_hide_the_queued_job(runs: Path) -> None:
    content("incarnation.json", "")(runs / "b")
    assert read_status(runs / "b").job_id == "78"
    content("successor", BINARY)(runs / "a")
    assert read_status(runs / "a").job_id == "77"


def test_the_supervisor_says_that_node_hours_are_not_counted(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line("attempts.jsonl", attempt(nodes=5))(runs / "b")
    monkeypatch.setattr(supervisor, "refuse_second_holder", lambda run: None)
    monkeypatch.setattr(supervisor, "measured_warning_s", lambda directory: None)
    job = Job(run_dir=str(runs / "b"), words=("train_small",), site="local", nodes=1, warning_s=60.0)
    finished = load_run("train_small", ["train.steps=1"])
    allocation = Allocation("7", ("n0",), "n0", 1, 1)
    run = BatchRun(job=job, config=finished, site=load_site("local"), allocation=allocation)
    assert supervisor.supervise(run) == 0
    assert (
        "attempts.jsonl: line 3 is damaged and ignored; the node-hours of the starts in these lines are not counted"
        in capfd.readouterr().err
    )
