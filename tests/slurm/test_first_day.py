"""Every command of docs/first_day.md, in order, on a local Slurm whose nodes have Frontier's shape.

Small scripts replace what this machine does not have: modules, conda, and git clone (a copy of this checkout). The
environment is the tests' own, with its CPU wheel in place of the ROCm wheel. `scripts/install_site.sh` is the real
script. It calls pip and the build of GPU kernels, and these two calls are only recorded. Jobs of the large models do
not run; `sbatch --test-only` checks them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from frontier_llm.cluster.sbatch import render_site
from frontier_llm.cluster.sites import load_site
from frontier_llm.machine.load import load_machine
from frontier_llm.run import run_dir
from tests.docs.pages import commands, fences
from tests.harness.slurm import FRONTIER_NODE, ROOT, LocalSlurm, local_slurm, why_unavailable
from tests.harness.system import missing

PAGE = ROOT / "docs" / "first_day.md"
# Commands that read the results of a job that is not run here.
WITHOUT_RESULTS = (
    "frontier-llm plan --measured runs/first --machine frontier",
    "frontier-llm scaling report runs/scaling",
)
# Two checkpoints of 12 TB do not fit on this machine. `submit` must report this and no other problem.
TOO_LARGE = "frontier-llm submit pretrain_1t"
COPIED = ("configs", "frontier_llm", "launch", "scripts", "slurm")
MACHINE_CHANGES = {"device": {"vendor": "none"}}


def site_changes(place: Path) -> dict[str, Any]:
    """Return the keys of the site file that a machine without GPUs, Slingshot and Orion needs."""
    return {
        "bind": "none",  # this machine has fewer cores than a Frontier node
        "interface": None,
        "interfaces": [],
        "libfabric_provider": None,
        "network_plugin": None,
        "node_local": str(place / "node_local"),
        "run_roots": [str(place)],
        "scratch": str(place),
    }


def write_changed(path: Path, changes: Mapping[str, Any]) -> None:
    """Replace keys of a YAML file, one level deep."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(content), encoding="utf-8")


def changed_keys(ours: Any, shipped: Any) -> set[str]:
    """Dotted keys in which two mappings differ."""
    if not isinstance(ours, dict) or not isinstance(shipped, dict):
        return set() if ours == shipped else {""}
    keys = ours.keys() | shipped.keys()
    return {f"{key}.{rest}".rstrip(".") for key in keys for rest in changed_keys(ours.get(key), shipped.get(key))}


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\nset -euo pipefail\n{text}", encoding="utf-8")
    path.chmod(0o755)


def stand_ins(place: Path, cluster: LocalSlurm) -> Path:
    """Write the commands that this machine does not have. Returns their folder, for PATH."""
    folder = place / "bin"
    python = shlex.quote(sys.executable)
    modules = " ".join(load_site("frontier").modules)
    write_command(
        folder / "module",
        f'[[ "$1" == load ]]\nfor name in "${{@:2}}"; do\n'
        f'    [[ " {modules} " == *" $name "* ]] || {{ echo "module: $name is not known" >&2; exit 1; }}\ndone\n',
    )
    write_command(
        folder / "conda",
        f"""[[ "$1 $2 $3" == "create --yes --prefix" && "$5" == python=3.12 ]]
mkdir -p "$4/bin"
cp {place}/python "$4/bin/python"
cp {place}/python "$4/bin/python3"
cp {place}/frontier-llm "$4/bin/frontier-llm"
""",
    )
    write_command(
        place / "python",
        f"""case "$*" in
"-m pip install "* | "setup.py "*) echo "$*" >>{place}/installed ;;
*) exec {python} "$@" ;;
esac
""",
    )
    write_command(place / "frontier-llm", f'exec {python} -m frontier_llm.cli.main "$@"\n')
    (folder / "activate").write_text('export CONDA_PREFIX="$1" PATH="$1/bin:$PATH"\n', encoding="utf-8")
    write_command(folder / "conda-pack", '[[ "$2 $4" == "--prefix --output" ]]\ntar -czf "$5" -C "$3" .\n')
    is_cpu_build = "import torch; assert torch.version.hip is None and torch.version.cuda is None"
    write_command(folder / "pip", f'[[ "$1 $2" == "install torch==2.10.0" ]]\n{python} -c "{is_cpu_build}"\n')
    write_command(folder / "git", f'[[ "$1" == clone ]]\nmv {shlex.quote(str(place / "prepared"))} "$3"\n')
    # Jobs of the large models: Slurm checks the script against a partition of Frontier's size.
    sbatch = shutil.which("sbatch", path=cluster.env["PATH"])
    write_command(
        folder / "sbatch",
        f'if [[ "$*" == *train_small.sbatch* ]]; then exec {sbatch} "$@"; fi\n'
        f'{sbatch} --test-only "$@" 2>>{place}/checked\necho "$*" >>{place}/queued\necho 999999\n',
    )
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a project directory with a copy of this checkout. Its site file and machine file describe this machine."""
    prepared = tmp_path / "prepared"
    for name in COPIED:
        shutil.copytree(ROOT / name, prepared / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "abc123").mkdir()
    (tmp_path / "node_local").mkdir()
    site_file = prepared / "slurm" / "sites" / "frontier.yaml"
    write_changed(site_file, site_changes(tmp_path))
    write_changed(prepared / "configs" / "machines" / "frontier.yaml", MACHINE_CHANGES)
    site_file.with_suffix(".sh").write_text(render_site(load_site(str(site_file))), encoding="utf-8")
    return tmp_path


@pytest.fixture
def frontier() -> Iterator[LocalSlurm]:
    """Start a cluster with Frontier's name and nodes."""
    if reason := why_unavailable():
        missing(reason)
    with local_slurm(nodes=2, shape=FRONTIER_NODE, name="frontier") as cluster:
        yield cluster


def page_commands() -> list[str]:
    return [line for fence in fences(PAGE) if fence.language in ("bash", "console") for line in commands(fence)]


@pytest.mark.thorough
def test_site_and_machine_differ_in_the_named_keys_only(place: Path) -> None:
    site = load_site(str(place / "prepared" / "slurm" / "sites" / "frontier.yaml")).model_dump(mode="json")
    assert changed_keys(site, load_site("frontier").model_dump(mode="json")) == set(site_changes(place))
    machine = load_machine(str(place / "prepared" / "configs" / "machines" / "frontier.yaml")).model_dump(mode="json")
    assert changed_keys(machine, load_machine("frontier").model_dump(mode="json")) == {"device.vendor"}


def sections(text: str) -> list[str]:
    """Return the parts of the page that begin with a heading of the second or third level."""
    return re.split(r"^###? ", text, flags=re.MULTILINE)[1:]


def commands_of(section: str) -> list[str]:
    """Return the commands in the fences of a section. `a && b` counts as two."""
    found = re.findall(r"^```(?:bash|console)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return [part for line in "".join(found).splitlines() for part in line.split(" && ")]


def described_commands(section: str) -> list[str]:
    """Return the code spans in the first cells of the section's table. Each is the beginning of a command and its
    options.
    """
    rows = re.findall(r"^\| (`.*?) \| .*\w.* \|$", section, flags=re.MULTILINE)
    return [span for row in rows for span in re.findall(r"`(.*?)`", row)]


def describes(span: str, command: str) -> bool:
    """Return whether a span contains only words of the command. A dry run is a different command."""
    words = re.split(r"[\s=]+", command)
    return set(span.split()) <= set(words) and ("--dry-run" in span) == ("--dry-run" in command)


def test_each_command_says_what_it_checks() -> None:
    """Each command has a row in a table of its section, and each row has a command."""
    found = sections(PAGE.read_text(encoding="utf-8"))
    without_row = []
    without_command = []
    for section in found:
        lines = commands_of(section)
        spans = described_commands(section)
        without_row += [line for line in lines if not any(describes(span, line) for span in spans)]
        without_command += [span for span in spans if not any(describes(span, line) for line in lines)]
    assert without_row == []
    assert without_command == []
    tested = [part for line in page_commands() for part in line.split(" && ")]
    assert [line for section in found for line in commands_of(section)] == tested


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_command_runs(frontier: LocalSlurm, place: Path) -> None:
    folder = stand_ins(place, frontier)
    (place / "text.txt").write_text("".join(chr(97 + number % 26) for number in range(1000)) * 20_000, encoding="utf-8")
    lines = [line.replace("<this repository>", "repository") for line in page_commands() if line not in WITHOUT_RESULTS]
    assert len(page_commands()) - len(lines) == len(WITHOUT_RESULTS)
    assert [line for line in lines if line.startswith(TOO_LARGE)] == lines[-1:]
    lines[-1] = f"if {lines[-1]} 2>refusal; then exit 9; fi"
    environment = {
        **frontier.env,
        "PATH": f"{folder}:{frontier.env['PATH']}",
        "MEMBERWORK": str(place),
        "TEXT": str(place / "text.txt"),
        "TOKENIZER": "bytes",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(place / "abc123" / "frontier_llm"),
    }
    for name in ("FRONTIER_LLM_PYTHON", "FRONTIER_LLM_ROOT", "FRONTIER_LLM_SITE", "VIRTUAL_ENV", "CONDA_PREFIX"):
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
    )
    checkout = place / "abc123" / "frontier_llm"
    outputs = "".join(path.read_text(errors="replace") for path in checkout.glob("*.out"))
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}\n{outputs[-3000:]}"
    run = checkout / "runs" / "train_small"
    assert [row["step"] for row in run_dir.steps(run)] == list(range(1, 11)) and run_dir.latest_step(run) == 10
    assert json.loads((run / "plan.json").read_text())["grid"]["dp"] == 2
    assert outputs.index("this job takes 1 node") < outputs.index("attempt 1:")
    installed = (place / "installed").read_text().splitlines()
    assert "-m pip install --no-build-isolation --editable ." in installed
    assert installed[-1] == "setup.py build_ops --arch gfx90a"
    assert "everything that ranks need is installed" in done.stdout + done.stderr
    queued = (place / "queued").read_text()
    large = ("first", "train_22b", "tune", "weak_series", "train_175b", "train_1t")
    assert [name for name in large if name not in queued] == []
    assert (place / "checked").read_text().count("to start at") == len(large)
    refusal = (checkout / "refusal").read_text()
    assert "the first 2 checkpoints need 22.0 TiB" in refusal and refusal.count("fix:") == 1
