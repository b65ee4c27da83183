"""Tests the scripts of launch/, which run between sbatch and Python, with stand-ins for the site's commands."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from frontier_llm.cluster import slurm
from frontier_llm.cluster.rank_logs import rank_log, rank_logs
from frontier_llm.cluster.sbatch import render_site
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.errors import ConfigError
from frontier_llm.machine.env import environment as machine_variables
from frontier_llm.run.job import Job, write_job

LAUNCH = root_dir() / "launch"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with launch/ and one site. The site's modules put their own Python first on PATH and set RCCL's
    variables.
    """
    shutil.copytree(LAUNCH, tmp_path / "root" / "launch")
    executable(tmp_path / "modules" / "python3", "echo python of the modules; exit 1")
    site = tmp_path / "root" / "slurm" / "sites" / "fake.sh"
    site.parent.mkdir(parents=True)
    site.write_text(f"export PATH={tmp_path}/modules:$PATH NCCL_SOCKET_IFNAME=module NCCL_CROSS_NIC=module\n")
    return tmp_path / "root"


def job_sh(root: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (root / "say.py").write_text(
        "import os, sys\nprint(os.environ['FRONTIER_LLM_PYTHON'], *(os.environ[n] for n in sys.argv[1:]))"
    )
    command = [str(root / "launch" / "job.sh"), "fake", "say", "NCCL_SOCKET_IFNAME", "NCCL_CROSS_NIC"]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **variables})


def environment(tmp_path: Path) -> Path:
    """An active environment whose python3 runs the interpreter of this test."""
    executable(tmp_path / "env" / "bin" / "python3", f'exec {sys.executable} "$@"')
    return tmp_path / "env"


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_environment_active_at_sbatch_wins_over_the_modules(root: Path, tmp_path: Path, name: str) -> None:
    done = job_sh(root, **{name: str(environment(tmp_path))})
    assert done.stdout.split() == [f"{tmp_path}/env/bin/python3", "module", "module"], done.stderr


def test_what_the_user_exported_wins_over_the_modules(root: Path, tmp_path: Path) -> None:
    done = job_sh(root, FRONTIER_LLM_PYTHON=sys.executable, NCCL_SOCKET_IFNAME="it's $mine")
    assert done.stdout == f"{sys.executable} it's $mine module\n", done.stderr


def test_what_a_module_has_set_before_sbatch_is_not_the_users(root: Path) -> None:
    site = root / "slurm" / "sites" / "fake.sh"
    site.write_text(
        site.read_text()
        + 'FRONTIER_LLM_FROM_MODULES="$(export -p)"\nexport NCCL_SOCKET_IFNAME=ours NCCL_CROSS_NIC=ours\n'
    )
    before = {"FRONTIER_LLM_PYTHON": sys.executable, "NCCL_SOCKET_IFNAME": "module", "NCCL_CROSS_NIC": "mine"}
    done = job_sh(root, **before)
    assert done.stdout == f"{sys.executable} ours mine\n", done.stderr


def test_the_names_of_the_users_and_the_modules_variables_reach_the_supervisor(root: Path) -> None:
    site = root / "slurm" / "sites" / "fake.sh"
    site.write_text(site.read_text() + 'FRONTIER_LLM_FROM_MODULES="$(export -p)"\n')
    (root / "say.py").write_text(
        "import os\nprint(os.environ['FRONTIER_LLM_USER_VARIABLES'], os.environ['FRONTIER_LLM_MODULE_VARIABLES'])"
    )
    exported = {"NCCL_SOCKET_IFNAME": "module", "NCCL_CROSS_NIC": "mine", "GPU_MAX_HW_QUEUES": "4", "OTHER": "1"}
    env = {"PATH": "/usr/bin:/bin", "FRONTIER_LLM_PYTHON": sys.executable, **exported}
    done = subprocess.run([root / "launch" / "job.sh", "fake", "say"], capture_output=True, text=True, env=env)
    assert done.stdout == "GPU_MAX_HW_QUEUES NCCL_CROSS_NIC NCCL_CROSS_NIC NCCL_SOCKET_IFNAME\n", done.stderr


def test_every_variable_of_the_machines_is_kept_by_the_job_if_the_user_has_exported_it(root: Path) -> None:
    """launch/job.sh restores variables that the user has exported, by a pattern of names."""
    names = sorted({variable.name for name in ("frontier", "lumi") for variable in machine_variables(name, 9000)})
    site = root / "slurm" / "sites" / "fake.sh"
    site.write_text("".join(f"export {name}=site\n" for name in names))
    (root / "say.py").write_text("import os, sys\nprint(*(os.environ[name] for name in sys.argv[1:]))")
    env = {"PATH": "/usr/bin:/bin", "FRONTIER_LLM_PYTHON": sys.executable, **dict.fromkeys(names, "mine")}
    done = subprocess.run([root / "launch" / "job.sh", "fake", "say", *names], capture_output=True, text=True, env=env)
    assert done.stdout.split() == ["mine"] * len(names), done.stderr


def test_a_program_can_run_with_the_python_of_the_ranks(root: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "singularity", 'echo "container: ${@: -4}"')
    (tmp_path / "image.sif").touch()
    env = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
        "FRONTIER_LLM_PYTHON": sys.executable,
        "FRONTIER_LLM_CONTAINER": f"{tmp_path}/image.sif",
    }
    command = [root / "launch" / "job.sh", "fake", "--rank-python", "say", "word"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout == "container: -P -m say word\n", done.stderr
    executable(root / "launch" / "broadcast_env.sh", f'echo "{sys.executable}"; echo')
    (root / "say.py").write_text("import os\nprint(os.environ['FRONTIER_LLM_PYTHON'])")
    of_archive = {"PATH": "/usr/bin:/bin", "FRONTIER_LLM_ENV_ARCHIVE": "env.tar.gz"}
    done = subprocess.run(command, capture_output=True, text=True, env=of_archive, cwd=tmp_path)
    assert done.stdout == f"{sys.executable}\n", done.stderr  # the unpacked archive


def test_a_python_without_the_package_is_explained(root: Path) -> None:
    done = job_sh(root)
    assert done.returncode == 2
    assert f"{root.parent}/modules/python3" in done.stderr and "export FRONTIER_LLM_PYTHON" in done.stderr


def container(tmp_path: Path, **variables: str) -> list[str]:
    """Return the arguments that a container's runtime receives."""
    executable(tmp_path / "bin" / "singularity", 'printf "%s\\n" "$@"')
    return container_says(tmp_path, **variables)


def container_says(tmp_path: Path, **variables: str) -> list[str]:
    (tmp_path / "image.sif").touch()
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FRONTIER_LLM_CONTAINER": f"{tmp_path}/image.sif", **variables}
    done = subprocess.run(
        [LAUNCH / "container_python.sh", "-m", "a b"], capture_output=True, text=True, env=env, cwd=tmp_path, check=True
    )
    return done.stdout.splitlines()


def test_the_containers_python_sees_the_data_and_not_the_hosts_rocm(tmp_path: Path) -> None:
    words = container(tmp_path, FRONTIER_LLM_BINDS="/data,/more", FRONTIER_LLM_ROOT="/code")
    assert words[:2] == ["exec", "--bind"] and words[3:] == [f"{tmp_path}/image.sif", "python3", "-m", "a b"]
    assert {str(tmp_path), "/code", "/tmp", "/data", "/more"} <= set(words[2].split(","))
    assert "--rocm" not in words
    # otherwise packages in ~/.local come before the image's packages
    executable(tmp_path / "bin" / "singularity", 'echo "${PYTHONNOUSERSITE-}"')
    assert container_says(tmp_path) == ["1"]


def test_a_sites_own_binds_replace_ours(tmp_path: Path) -> None:
    ours = set(container(tmp_path)[2].split(","))
    theirs = set(container(tmp_path, SINGULARITY_BIND="/opt/cray")[2].split(","))
    assert theirs <= ours and not theirs & {"/opt/cray", "/sw", "/var/spool/slurmd"}


def test_a_missing_image_is_explained(tmp_path: Path) -> None:
    env = {**os.environ, "FRONTIER_LLM_CONTAINER": f"{tmp_path}/none.sif"}
    done = subprocess.run([LAUNCH / "container_python.sh"], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and "apptainer build" in done.stderr


def test_the_address_is_the_interfaces_own(tmp_path: Path) -> None:
    executable(
        tmp_path / "ip",
        '[[ "$*" == *"dev hsn0" ]] && echo "7: hsn0    inet 10.128.0.9/18 brd 10.128.63.255 scope global hsn0"',
    )
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([LAUNCH / "address.sh", "hsn0"], capture_output=True, text=True, env=env)
    assert done.stdout == "10.128.0.9\n", done.stderr
    done = subprocess.run([LAUNCH / "address.sh", "hsn9"], capture_output=True, text=True, env=env)
    assert done.returncode != 0 and "hsn9" in done.stderr


def test_a_rank_has_its_own_log_and_rank_0_speaks_to_the_job_too(tmp_path: Path) -> None:
    outputs = []
    for rank in ("0", "1", "999", "1000", "75263"):
        env = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": rank, "FRONTIER_LLM_LOG_DIR": str(tmp_path / "logs")}
        command = [LAUNCH / "rank.sh", "bash", "-c", "echo out $SLURM_PROCID; echo err >&2"]
        outputs.append(subprocess.run(command, capture_output=True, text=True, env=env).stdout)
    assert outputs == ["out 0\nerr\n", "", "", "", ""]
    for rank, number in enumerate(("0", "1", "999", "1000", "75263")):
        log = rank_log(tmp_path / "logs", int(number))
        assert log.read_text() == f"out {number}\nerr\n", rank
    folders = sorted(path.name for path in (tmp_path / "logs").iterdir() if path.is_dir())
    assert folders == ["001000", "075000"] and len(rank_logs(tmp_path / "logs")) == 5


def test_a_rank_leaves_no_bytecode_and_no_core_behind(tmp_path: Path) -> None:
    (tmp_path / "module.py").touch()
    env = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "1", "PYTHONPATH": str(tmp_path)}
    words = [LAUNCH / "rank.sh", "bash", "-c", f"ulimit -S -c; {sys.executable} -c 'import module'"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -S -c hard; exec "$@"', "bash", *words],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout == "0\n" and not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize("can_hold", [True, False])
def test_a_warning_before_the_program_runs_waits_where_env_can_hold_it(can_hold: bool, tmp_path: Path) -> None:
    if not can_hold:
        executable(tmp_path / "bin" / "env", "exit 125")  # coreutils before 8.31
    program = executable(tmp_path / "program", "kill -USR1 $$; echo alive")
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_PROCID": "0"}
    done = subprocess.run([LAUNCH / "rank.sh", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == ((0, "alive\n") if can_hold else (-signal.SIGUSR1, "")), done.stderr


def test_an_unknown_binding_is_refused(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "0", "FRONTIER_LLM_BIND": "gdc"}
    done = subprocess.run([LAUNCH / "rank.sh", "true"], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and "FRONTIER_LLM_BIND=gdc is neither gcd nor none" in done.stderr


def broadcast(
    tmp_path: Path, dead: str = "", gone: str = "", spares: int = 0, words: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run launch/broadcast_env.sh on n0 and n1. Every command fails on the node `dead`. Slurm no longer has the node
    `gone`.
    """
    bin_dir = tmp_path / "bin"
    executable(
        bin_dir / "srun",
        'while [[ "$1" == --* ]]; do [[ "$1" != --nodelist=* ]] || nodes="${1#*=}"; shift; done\n'
        'for node in ${nodes//,/ }; do [[ "$node" == "$DEAD" ]] || SLURMD_NODENAME="$node" "$@" || exit 1; done',
    )
    executable(bin_dir / "sbcast", 'shift 2; cp "$1" "$2"; [[ -z "$DEAD" ]]')
    executable(bin_dir / "scontrol", r"printf 'n0\nn1\n'")
    executable(bin_dir / "sinfo", 'echo "$GONE"')
    if not (tmp_path / "env").exists():
        executable(tmp_path / "env" / "bin" / "python", "echo mine")
        subprocess.run(["tar", "-czf", "env.tar.gz", "-C", "env", "."], check=True, cwd=tmp_path)
        (tmp_path / "local" / "frontier_llm_env_7").mkdir(parents=True)  # another user has guessed the name
    env = {
        "PATH": f"{bin_dir}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "DEAD": dead,
        "GONE": gone,
    }
    env |= {"FRONTIER_LLM_NODE_LOCAL": f"{tmp_path}/local", "FRONTIER_LLM_SPARE_NODES": str(spares)}
    command = [str(LAUNCH / "broadcast_env.sh"), f"{tmp_path}/env.tar.gz", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_the_broadcast_environment_lies_in_a_private_folder_that_nobody_can_foresee(tmp_path: Path) -> None:
    done = [broadcast(tmp_path, gone="n1", spares=1) for _ in range(2)]
    pythons = [Path(one.stdout.splitlines()[0]) for one in done]
    assert pythons[0] != pythons[1] and all(python.is_file() for python in pythons)
    assert [python.parents[1].stat().st_mode & 0o777 for python in pythons] == [0o700, 0o700]


def test_spares_stand_in_for_nodes_that_do_not_get_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = broadcast(tmp_path, dead="n1", spares=1)
    assert done.returncode == 0 and done.stdout.splitlines()[1] == "n1", done.stderr
    assert broadcast(tmp_path, gone="n0", spares=1).stdout.splitlines()[1] == "n0"
    done = broadcast(tmp_path, dead="n1")
    assert (
        done.returncode == 1
        and "n1 did not get the environment (sbcast ended with 1), and the job has only 0 spares" in done.stderr
        and not done.stdout
    )
    write_job(Job(run_dir=f"{tmp_path}/run", words=("r",), site="local", nodes=1, warning_s=60.0, spares=1))
    recorded = ["frontier_llm.cli.job", f"--run-dir={tmp_path}/run"]
    assert broadcast(tmp_path, dead="n1", words=recorded).returncode == 0
    assert broadcast(tmp_path, dead="n1", words=[*recorded, "job.spares=0"]).returncode == 1
    assert broadcast(tmp_path, dead="n1", words=["frontier_llm.cli.job", "r", "job.spares=1"]).returncode == 0
    refused = broadcast(tmp_path, dead="n1", words=["job.spares=a[$(touch evil)]"])
    assert refused.returncode == 2 and "is not a number of spare nodes" in refused.stderr
    monkeypatch.setenv("FRONTIER_LLM_BROKEN_NODES", "n1,n4")
    monkeypatch.setattr(slurm, "ask", lambda command: "n0|idle\nn1|allocated\nn2|draining\n")
    assert slurm.unhealthy(["n0", "n1", "n2"]) == ["n1", "n2"]


def test_libraries_of_the_host_that_an_image_lacks_come_with_it(tmp_path: Path) -> None:
    """The container gets each of the five libraries that this machine has. The user's own list is kept."""
    executable(tmp_path / "bin" / "apptainer", 'echo "libraries ${APPTAINER_CONTAINLIBS:-none}"')
    here = [
        path
        for name in ("libcxi.so.1", "libjson-c.so.3", "libnl-3.so.200", "libjansson.so.4")
        if (path := Path("/usr/lib64") / name).exists()
    ] + [path for path in [Path("/lib64/libtinfo.so.6")] if path.exists()]
    (tmp_path / "image.sif").touch()
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "FRONTIER_LLM_CONTAINER": f"{tmp_path}/image.sif"}
    command = [LAUNCH / "container_python.sh"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert done.stdout.split() == ["libraries", ",".join(map(str, here)) or "none"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**env, "APPTAINER_CONTAINLIBS": "/mine.so"},
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.split() == ["libraries", "/mine.so"]


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ({}, "offline 1 1"),
        ({"WANDB_MODE": "online", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}, "online 0 0"),
        ({"WANDB_MODE": "disabled"}, "disabled 1 1"),
    ],
)
def test_ranks_are_offline_unless_the_user_says_otherwise(users: dict[str, str], expected: str) -> None:
    command = ["sh", "-c", 'echo "$WANDB_MODE $HF_HUB_OFFLINE $TRANSFORMERS_OFFLINE"']
    variables = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "1", **users}
    done = subprocess.run([str(LAUNCH / "rank.sh"), *command], capture_output=True, text=True, env=variables)
    assert done.stdout.strip() == expected, done.stderr


def test_a_sites_proxy_is_used_unless_the_user_has_one(tmp_path: Path) -> None:
    site = load_site("local").model_copy(update={"proxy": "http://proxy.site:3128"})
    script = tmp_path / "site.sh"
    script.write_text(render_site(site) + 'echo "$http_proxy $https_proxy $no_proxy"\n')
    variables = {"PATH": "/usr/bin:/bin", "https_proxy": "http://mine:1"}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=variables)
    assert done.stdout.strip() == "http://proxy.site:3128 http://mine:1 localhost,127.0.0.1", done.stderr


def test_a_proxy_is_an_address_and_a_port(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    shipped = (root_dir() / "slurm" / "sites" / "local.yaml").read_text(encoding="utf-8")
    file.write_text(shipped + '\nproxy: "http://proxy:3128/$(reboot)"\n')
    with pytest.raises(ConfigError, match="proxy"):
        load_site(str(file))
