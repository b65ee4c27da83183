from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cluster import sbatch
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.config import load_run, saves_nothing
from frontier_llm.errors import ConfigError
from frontier_llm.planner.predict import START_S, predict
from frontier_llm.topology.plan import plan_problems

FRONTIER = load_site("frontier")


@pytest.mark.parametrize("relative", [str(path) for path in sbatch.rendered_files()])
def test_committed_files_are_what_the_renderer_gives(relative: str) -> None:
    assert (root_dir() / relative).read_text() == sbatch.rendered_files()[Path(relative)], (
        "run python -m frontier_llm.cluster.sbatch"
    )


def test_check_notices_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbatch, "root_dir", lambda: tmp_path)
    for relative in sbatch.rendered_files():
        (tmp_path / relative).parent.mkdir(parents=True, exist_ok=True)
    assert sbatch.main([]) == 0 and sbatch.main(["--check"]) == 0
    (tmp_path / "slurm" / "train_1t.sbatch").write_text("#!/bin/bash\n")
    assert sbatch.main(["--check"]) == 1


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_scripts_pass_shellcheck() -> None:
    scripts = [
        *(root_dir() / "slurm").rglob("*.sbatch"),
        *(root_dir() / "slurm" / "sites").glob("*.sh"),
        *(root_dir() / "launch").glob("*.sh"),
    ]
    assert len(scripts) >= 15
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("job", [job for job in sbatch.JOBS if job.config], ids=lambda job: job.name)
def test_every_script_names_files_that_exist_and_a_legal_layout(job: sbatch.JobScript) -> None:
    assert (root_dir() / job.config).is_file()
    config = load_run(str(root_dir() / job.config))
    world = job.nodes * load_site(job.site).tasks_per_node
    if job.name == "weak_scaling":  # its batch size is given per replica
        replicas = world // (config.parallel.tensor * config.parallel.pipeline)
        config = load_run(str(root_dir() / job.config), [f"batch.global_batch={config.batch.global_batch * replicas}"])
    assert plan_problems(config, world) == []
    assert len((root_dir() / job.config).read_text().splitlines()) <= 30


def test_walltime_and_signal_follow_the_site() -> None:
    (job,) = [job for job in sbatch.JOBS if job.name == "pretrain_1t"]
    options = dict(sbatch.directives(job, FRONTIER))
    assert (options["nodes"], options["time"], options["signal"]) == ("384", "12:00:00", "USR1@2010")
    assert dict(sbatch.directives(replace(job, nodes=64), FRONTIER))["time"] == "02:00:00"


TRAINING = [job for job in sbatch.JOBS if job.program == "frontier_llm.cli.job"]
BENCHMARKS = [job for job in TRAINING if saves_nothing(load_run(str(root_dir() / job.config)).train)]
# Step times from published tokens/s per GCD (arXiv:2312.12705). For 22B nothing was published, so the planner's step
# time is used.
ORNL_STEP_S = {"train_22b": 21.0, "train_175b": 427.0, "train_1t": 853.0}


@pytest.mark.parametrize("job", BENCHMARKS, ids=lambda job: job.name)
def test_a_benchmark_ends_well_before_its_walltime(job: sbatch.JobScript) -> None:
    config = load_run(str(root_dir() / job.config))
    needed_s = START_S + config.train.steps * ORNL_STEP_S[job.name]
    assert job.minutes is not None and 1.3 * needed_s < 60 * job.minutes - sbatch.BENCHMARK_WARNING_S
    predicted_s = START_S + config.train.steps * predict(config, job.nodes * 8).step_time_s
    assert predicted_s < 3600  # `sbatch slurm/train_1t.sbatch` measures 1T in less than an hour


@pytest.mark.parametrize("job", [job for job in TRAINING if job not in BENCHMARKS], ids=lambda job: job.name)
def test_ranks_are_warned_earlier_than_a_step_takes(job: sbatch.JobScript) -> None:
    site = load_site(job.site)
    config = load_run(str(root_dir() / job.config), [f"machine={site.machine}"])
    step_s = predict(config, job.nodes * site.tasks_per_node).step_time_s
    warning_s = int(dict(sbatch.directives(job, site))["signal"].removeprefix("USR1@"))
    assert 2 * step_s < warning_s < 60 * (site.max_minutes(job.nodes) or 0) / 4


@pytest.mark.parametrize("evil", ["a b", "$(reboot)", "a\n#SBATCH --nodes=1", "`x`", "a;b", "a'b"])
def test_no_option_smuggles_more_than_a_word(evil: str) -> None:
    with pytest.raises(ConfigError, match="characters that are not allowed"):
        sbatch.render(replace(sbatch.JOBS[0], name=evil), FRONTIER)


def test_no_comment_ends_early() -> None:
    with pytest.raises(ConfigError, match="cannot be printed"):
        sbatch.render(replace(sbatch.JOBS[0], about="x\nreboot"), FRONTIER)


def test_site_values_expand_names_and_nothing_else(tmp_path: Path) -> None:
    site = FRONTIER.model_copy(
        update={
            "modules": (),
            "environment": {"A": "$HOME/x:$UNSET_NAME", "B": 'a"$(touch evil)`touch evil`\\ $HOME', "C": "$(id)"},
        }
    )
    script = sbatch.render_site(site) + 'printf "%s\\n" "$A" "$B" "$C"\n'
    done = subprocess.run(
        ["bash", "-uc", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"HOME": "/h", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.splitlines() == ["/h/x:", 'a"$(touch evil)`touch evil`\\ /h', "$(id)"], done.stderr
    assert list(tmp_path.iterdir()) == []


def test_modules_do_not_set_what_depends_on_the_node_count(tmp_path: Path) -> None:
    script = (
        "module() { export NCCL_SOCKET_IFNAME=all FI_CXI_DEFAULT_CQ_SIZE=1 NCCL_CROSS_NIC=1; }\n"
        + sbatch.render_site(FRONTIER)
    )
    script += 'echo "${NCCL_SOCKET_IFNAME-unset} ${FI_CXI_DEFAULT_CQ_SIZE-unset} $NCCL_CROSS_NIC"\n'
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.stdout == "unset unset 1\n", done.stderr
    with pytest.raises(ConfigError, match="not the name of a variable"):
        sbatch.render_site(FRONTIER.model_copy(update={"unset": ("A; reboot",)}))


@pytest.mark.parametrize("warning", ["", "$(id) 7"])
def test_overrides_arrive_as_words(tmp_path: Path, warning: str) -> None:
    """Arguments after the script's name reach the program unchanged, including spaces and quotes."""
    (tmp_path / "launch").mkdir()
    fake = tmp_path / "launch" / "job.sh"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    words = ["train.steps=100", "data.train=[{path: a b}]", "x='$(id)'; rm -rf *"]
    script = str(root_dir() / "slurm" / "train_1t.sbatch")
    done = subprocess.run(
        ["bash", script, *words],
        capture_output=True,
        text=True,
        env={"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "FRONTIER_LLM_SIGNAL_LEAD_S": warning},
    )
    assert done.stdout.splitlines() == [
        "frontier",
        "frontier_llm.cli.job",
        "configs/runs/train_1t.yaml",
        "ops.no_jit=true",
        f"job.warning_s={warning or 60}",
        *words,
    ]


def test_scripts_without_a_run_file_pass_words_to_their_command() -> None:
    commands = {job.name: job.command(FRONTIER) for job in sbatch.JOBS if not job.config}
    assert commands == {
        "tokenize": "frontier_llm.cli.main data tokenize --in-job",
        "evaluate": "frontier_llm.cli.main evaluate --follow",
        "export": "--rank-python frontier_llm.cli.main checkpoint export-hf",
    }


def test_bind_script_has_the_published_map() -> None:
    text = (root_dir() / "launch" / "bind_gcd.sh").read_text()
    assert "cores=(49-55 57-63 17-23 25-31 1-7 9-15 33-39 41-47)" in text  # LUMI's map_cpu: 49,57,17,25,1,9,33,41
    assert "numa=(3 3 1 1 0 0 2 2)" in text


@pytest.mark.parametrize(("local_rank", "code"), [("3", 0), ("8", 2)])
def test_bind_script_pins_by_local_rank(tmp_path: Path, local_rank: str, code: int) -> None:
    for name in ("numactl", "taskset"):
        (tmp_path / name).write_text('#!/bin/bash\necho "$@"\n')
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_LOCALID": local_rank, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [str(root_dir() / "launch" / "bind_gcd.sh"), "echo", "hi"], capture_output=True, text=True, env=env
    )
    assert done.returncode == code
    if code == 0:
        assert done.stdout == "--physcpubind=25-31 --preferred=1 -- echo hi\n"
