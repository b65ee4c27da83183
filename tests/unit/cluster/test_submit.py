from __future__ import annotations

import json
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from frontier_llm.certificate import memory as certificate_memory
from frontier_llm.cli.main import main
from frontier_llm.cluster import slurm
from frontier_llm.cluster.code import code_digest, snapshot
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.config import load_run
from frontier_llm.errors import Problem
from frontier_llm.run import run_dir
from frontier_llm.run.holder import reserved, this_process
from frontier_llm.run.job import read_job
from tests.harness.submissions import PRETRAIN_1T, SMALL


def test_everything_wrong_is_said_before_sbatch_is_called(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "submit",
        "train_1t",
        "--site",
        "frontier",
        "--nodes",
        "500",
        "--time",
        "20:00:00",
        f"train.run_dir={tmp_path}/r",
    ]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert (
        "-A PROJECT" in err
        and "at most 12:00:00" in err
        and "500 nodes of 8 ranks cannot be divided into replicas" in err
        and "--nodes 448 or 512" in err
    )
    assert fake_slurm.read_text() == "" and not (tmp_path / "r").exists()


@pytest.mark.parametrize("flag", ["--account", "--partition", "--qos"])
def test_names_that_could_be_more_are_refused(fake_slurm: Path, tmp_path: Path, flag: str) -> None:
    assert main([*SMALL, "--nodes", "1", flag, "x;reboot", f"train.run_dir={tmp_path}/r"]) == 2
    assert "sbatch" not in fake_slurm.read_text()


def test_dry_run_writes_and_queues_nothing(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash") and "#SBATCH --time=" in out
    calls = fake_slurm.read_text().splitlines()
    assert sorted(calls) == ["scontrol show config ", "scontrol show reservation --oneliner "]
    assert not (tmp_path / "r").exists()


def test_a_submission_freezes_code_and_configuration(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "a run"
    run_dir.add_bad_hosts(directory, ["n3"])
    run_dir.distrust(directory, ["n6"])
    assert (
        main(
            [
                *here,
                "--nodes",
                "1",
                "--spares",
                "1",
                "--exclude",
                "n[4-5]",
                "--json",
                f"train.run_dir={directory}",
                "train.steps=7",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    assert made["job_id"] == "4711"
    assert "--account=ABC123" in made["command"] and "--exclude=n[3-6]" in made["command"]
    assert "sbatch --parsable" in fake_slurm.read_text()
    # the running interpreter, not the python3 of the site's modules
    assert made["variables"]["FRONTIER_LLM_PYTHON"] == sys.executable
    code = Path(made["variables"]["FRONTIER_LLM_ROOT"])
    assert (
        code.name == f"code-{code_digest(load_site(str(tmp_path / 'here.yaml')))[:12]}"
        and (code / "launch" / "job.sh").stat().st_mode & stat.S_IXUSR
    )
    assert (code / "frontier_llm" / "cluster" / "submit.py").is_file()
    script = (directory / "job.sbatch").read_text()
    assert "#SBATCH --nodes=2" in script and f"'--run-dir={directory}'" in script
    job = read_job(directory)
    assert job is not None and (job.nodes, job.spares, job.continuation, job.site) == (1, 1, "requeue", "here")
    assert job.words == (f"{directory}/run.yaml", "machine=local", "ops.no_jit=true")
    assert f"#SBATCH --signal=USR1@{job.warning_s:.0f}" in script
    assert set(made["variables"]) == {"FRONTIER_LLM_PYTHON", "FRONTIER_LLM_ROOT", "FRONTIER_LLM_SITE"}
    assert not (directory / "submit.lock").exists()
    train = yaml.safe_load((directory / "run.yaml").read_text())["train"]
    assert (train["steps"], train["run_dir"]) == (7, str(directory))


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["a living process", "a record of another run"])
def test_a_directory_that_is_not_free_is_left_as_it_is(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    directory = tmp_path / "run"
    words = [*here, "--nodes", "1", f"train.run_dir={directory}"]
    assert main(words) == 0
    fake_slurm.write_text("")
    path = directory / "job.json"
    before = path.read_text()
    if by == "a living process":
        with reserved(directory):
            assert main([*words, "--spares", "3"]) == 2
        assert "is being submitted by a process on" in capsys.readouterr().err
    else:
        before = before.replace(str(directory), str(tmp_path / "other"))
        path.write_text(before)
        assert main([*words, "--spares", "3"]) == 2
        assert "the record of another run" in capsys.readouterr().err
    assert path.read_text() == before and "sbatch" not in fake_slurm.read_text()


@pytest.mark.thorough
@pytest.mark.usefixtures("fake_slurm")
def test_a_dead_process_does_not_keep_the_directory(here: list[str], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    dead = replace(this_process(), process_start="1")
    (directory / "submit.lock").write_bytes(dead.to_bytes())
    assert main([*here, "--nodes", "1", f"train.run_dir={directory}"]) == 0
    assert not (directory / "submit.lock").exists()


@pytest.mark.thorough
@pytest.mark.usefixtures("fake_slurm")
def test_a_queued_job_reads_the_plugin_as_it_was(
    here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    plugin = tmp_path / "mine.py"
    roots = []
    for content in ("x = 1\n", "x = 2\n"):  # the plugin is edited while the first job waits
        plugin.write_text(content)
        words = [f"train.run_dir={directory}", f"plugins=[{plugin}]"]
        assert main([*here, "--nodes", "1", "--json", *words]) == 0
        roots.append(Path(json.loads(capsys.readouterr().out)["variables"]["FRONTIER_LLM_ROOT"]))
        frozen = roots[-1] / "plugins" / "0" / "mine.py"
        assert yaml.safe_load((directory / "run.yaml").read_text())["plugins"] == [str(frozen.relative_to(directory))]
        assert load_run(str(directory / "run.yaml")).plugins == (str(frozen),)
    assert [(root / "plugins" / "0" / "mine.py").read_text() for root in roots] == ["x = 1\n", "x = 2\n"] and roots[
        0
    ] != roots[1]


def test_a_snapshot_that_is_there_is_used_again(tmp_path: Path) -> None:
    target = tmp_path / "code"
    site = load_site("local")
    snapshot(target, site)
    (target / "mark").touch()
    snapshot(target, site)
    assert (target / "mark").exists() and not list(tmp_path.glob("*.tmp*"))


def test_a_snapshot_holds_the_bytecode_that_ranks_would_each_write(tmp_path: Path) -> None:
    snapshot(tmp_path / "code", load_site("local"))
    package = tmp_path / "code" / "frontier_llm" / "training"
    sources = {path.stem for path in package.glob("*.py")}
    compiled = {path.name.split(".")[0] for path in (package / "__pycache__").glob("*.pyc")}
    assert compiled == sources and "loop" in sources


def test_overrides_without_equals_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "train_small", "train.steps", "--site", "local", "--nodes", "1"]) == 2
    assert "not of the form key=value" in capsys.readouterr().err


def test_a_token_target_is_the_length_of_the_run(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    words = [
        *here,
        "--nodes",
        "1",
        "train.steps=1M tokens",
        "--allow-change",
        "train.steps",
        f"train.run_dir={directory}",
    ]
    assert main(words) == 0
    # The length is written in tokens, because a batch size that changes during the run changes the number of steps.
    assert "steps: 1000000 tokens\n" in (directory / "run.yaml").read_text()
    job = read_job(directory)
    assert job is not None and job.flags == ("--allow-change", "train.steps")


def test_data_that_is_not_there_is_found_before_the_queue(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*here, "--nodes", "1", f"train.run_dir={tmp_path}/r", f"data.train=[{{path: {tmp_path}/tokens}}]"]
    assert main(words) == 1
    assert "tokens.bin: no such file, nor tokens.idx" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text() and not (tmp_path / "r").exists()


@pytest.mark.thorough
def test_a_refused_dry_run_still_prints_the_script(
    fake_slurm: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*here, "--nodes", "1", "--dry-run", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert main([*words, "data.tokenizer=/nowhere/tokenizer.json"]) == 1
    refused = capsys.readouterr()
    assert refused.out == shown.out and shown.out.startswith("#!/bin/bash")
    assert "/nowhere/tokenizer.json" in refused.err and "would refuse" not in shown.err
    assert main([*words, "--json", "data.tokenizer=/nowhere/tokenizer.json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_checkable"] and report["problems"][0]["where"] == "/nowhere/tokenizer.json"


@pytest.mark.thorough
def test_the_same_run_on_other_node_counts(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRETRAIN_1T, "--nodes", "384", "--dry-run", "--compare-nodes", "192", "--compare-nodes", "100"]
    assert main([*words, f"train.run_dir={tmp_path}/r"]) == 0
    err = capsys.readouterr().err
    rows = {line.split()[0]: line.split()[1:] for line in err.splitlines() if re.match(r"\s+(192|384) ", line)}
    assert set(rows) == {"192", "384"} and "100 nodes: " in err
    assert float(rows["192"][0]) > float(rows["384"][0])  # seconds per step
    assert int(rows["192"][1]) > int(rows["384"][1])  # jobs
    assert rows["384"][-1] == "unknown"


@pytest.mark.thorough
def test_the_days_in_the_queue_are_those_of_the_sites_table(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site that has measured its queue states the hours of a wait by number of nodes."""
    content = yaml.safe_load((root_dir() / "slurm" / "sites" / "frontier.yaml").read_text())
    content["queue_waits"] = [{"max_nodes": 200, "hours": 12}, {"max_nodes": 300, "hours": 48}]
    (tmp_path / "measured.yaml").write_text(yaml.safe_dump(content))
    words = [str(tmp_path / "measured.yaml") if word == "frontier" else word for word in PRETRAIN_1T]
    words += ["--nodes", "384", "--dry-run", "--compare-nodes", "192", f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    found = re.findall(r"^\s+(192|384) (.*)$", capsys.readouterr().err, re.MULTILINE)
    rows = {nodes: rest.split() for nodes, rest in found}
    jobs = int(rows["192"][1])
    assert jobs > 1 and float(rows["192"][-1].replace(",", "")) == pytest.approx(jobs * 12 / 24, abs=0.05)
    assert rows["384"][-1] == "unknown"


@pytest.mark.thorough
@pytest.mark.usefixtures("fake_slurm")
def test_a_second_submission_names_the_owner_of_the_first_job(
    here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*here, "--nodes", "1", f"train.run_dir={tmp_path}/run"]
    assert main(words) == 0
    active = {"JobState": "PENDING", "UserId": "anna(1001)"}
    monkeypatch.setattr(slurm, "job_fields", lambda job_id: active if job_id == "4711" else {})
    assert main(words) == 2
    assert "job 4711 of anna already runs or is queued" in capsys.readouterr().err


def test_further_options_of_sbatch_are_passed_on_and_recorded(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sbatch", "mail-type=END", "--sbatch", "comment=it's $(mine)"]
    words = [*SMALL, "--nodes", "1", "--dry-run", "--json", *options, f"train.run_dir={tmp_path}/r"]
    assert main(words) == 0
    submission = json.loads(capsys.readouterr().out)
    assert {"--mail-type=END", "--comment=it's $(mine)"} <= set(submission["command"])
    assert submission["job"]["sbatch"] == ["mail-type=END", "comment=it's $(mine)"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        *[(f"{name}=x", f"{name} is set by the framework") for name in ("signal", "requeue", "open-mode", "output")],
        *[(f"{name}=x", f"{name} is set by the framework") for name in ("chdir", "export", "array", "wrap")],
        *[(f"{name}=x", f"{name} is set by the framework") for name in ("clusters", "nodefile", "nodelist")],
        ("sig=USR1@5", "signal is set by the framework"),  # sbatch accepts the beginning of a name
        ("nodes=3", "use --nodes and --spares"),
        ("dependency=after:1", "use --dependency"),
        ("time=5", "use --time"),
        ("mail-type", "'mail-type' is not KEY=VALUE"),
        ("--mail-type=END", "without dashes"),
        ("comment=a\nb", "is not KEY=VALUE"),
    ],
)
def test_options_that_the_framework_owns_are_refused_by_name(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert main([*SMALL, "--nodes", "1", f"--sbatch={word}", f"train.run_dir={tmp_path}/r"]) == 2
    assert message in capsys.readouterr().err and "sbatch" not in fake_slurm.read_text()


def test_a_webhook_that_others_can_read_is_refused_before_the_queue(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = tmp_path / "hook"
    hook.write_text("https://chat/secret")
    hook.chmod(0o644)
    words = [*SMALL, "--nodes", "1", "--dry-run", "--json", "--webhook-file", str(hook), f"train.run_dir={tmp_path}/r"]
    assert main(words) == 2 and "has mode 0644" in capsys.readouterr().err
    hook.chmod(0o600)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["job"]["webhook_file"] == str(hook) and "secret" not in shown


def test_a_section_that_is_not_checkable_here_is_submitted_only_by_force(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--nodes", "1", f"train.run_dir={tmp_path}/r"]
    assert main([*words, "--force", "memory"]) == 1  # the installation is still not checkable
    assert "--force installation submits without this section" in capsys.readouterr().err
    assert main([*words, "--force", "instalation"]) == 2
    assert "did you mean 'installation'" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text() and not (tmp_path / "r").exists()
    assert main([*words, "--force", "installation"]) == 0
    job = read_job(tmp_path / "r")
    assert job is not None and job.forced == ("installation",)


def test_force_does_not_pass_a_refused_section(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "--nodes", "1", f"train.run_dir={tmp_path}/r", "--force", "cost", "--force", "installation"]
    assert main([*words, "--max-node-hours", "0.01"]) == 2
    assert "node-hours are too few" in capsys.readouterr().err
    refusal = Problem(where="cost", what="is too high", fix="take fewer nodes")
    monkeypatch.setattr(certificate_memory, "cost_problems", lambda *arguments: [refusal])
    assert main(words) == 1
    assert "cost: is too high" in capsys.readouterr().err
    assert "sbatch" not in fake_slurm.read_text()
