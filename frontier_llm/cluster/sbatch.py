"""Generates the job scripts from one template with pure functions. The files under slurm/ are their committed results.

    python -m frontier_llm.cluster.sbatch          rewrite slurm/*.sbatch, slurm/sites/*.sh and launch/bind_gcd.sh
    python -m frontier_llm.cluster.sbatch --check  exit 1 if a committed file differs

A script contains no text that a user typed: overrides arrive as "$@", and account, partition and similar options are
arguments of sbatch.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_llm.cluster.sites import Site, format_walltime, load_site, root_dir, site_names
from frontier_llm.cluster.warning_time import warning_s
from frontier_llm.errors import ConfigError
from frontier_llm.machine.affinity import NODE, Place

# characters that neither a shell nor an #SBATCH line interprets
_PLAIN = re.compile(r"[A-Za-z0-9_.,:/+=@%^\[\]-]*")


@dataclass(frozen=True)
class JobScript:
    """One job script: the program that it starts and the resources that it requests from Slurm."""

    name: str
    about: str  # text of the script's comment line.
    config: str = ""  # path of the run file in a script under slurm/; '': the script names no run file.
    nodes: int = 1
    site: str = "frontier"
    minutes: int | None = None  # None: the longest walltime that the site allows for `nodes`.
    program: str = "frontier_llm.cli.job"  # module that launch/job.sh runs.
    words: tuple[str, ...] = ()  # arguments between the module and the run file.
    needs_rank_python: bool = False  # whether the program needs packages that only the ranks' interpreter may have.
    warning_s: int | None = None  # None: the site's warning time.
    arguments: str = (
        "[key=value ...] [job.spares=N ...] [--allow-change KEY]"  # words after the script, for its comment.
    )
    run_dir: str = ""  # set for a script of `submit`: its job.json contains all other settings.

    def command(self, site: Site) -> str:
        """Return the words after launch/job.sh and the site's name, quoted for the shell."""
        if self.run_dir:
            return shlex.join([self.program, f"--run-dir={self.run_dir}"])
        if not self.config:
            interpreter = ["--rank-python"] if self.needs_rank_python else []
            return shlex.join([*interpreter, self.program, *self.words])
        words = shlex.join([self.program, *self.words, self.config, "ops.no_jit=true"])
        # users could export this variable together with `sbatch --signal` before job.warning_s existed
        warning = f'"job.warning_s=${{FRONTIER_LLM_SIGNAL_LEAD_S:-{self.signal_s(site)}}}"'
        return f"{words} \\\n    {warning}"

    def signal_s(self, site: Site) -> int:
        """Return the seconds before the walltime at which Slurm warns the ranks."""
        return self.warning_s or site.warning_time_s


BENCHMARK_WARNING_S = 60  # a benchmark saves nothing before its walltime

# The walltime of a benchmark is about twice the sum of its start (10 minutes, assumed) and five steps. The time of a
# step follows from the throughput that ORNL published. The warning times of the 175B and 1T runs depend on the times of
# a step and a save. A step takes 427 s for 175B (48 tokens/s per GCD) and 853 s for 1T (7.5 tokens/s per GCD). A
# checkpoint has 12 bytes per parameter. For 175B it is 2.1 TB, written at BLOOM's measured 0.06 TB/s. For 1T it is 12
# TB. It is written at twice this rate (assumed), because three times the number of GPUs write.
JOBS: tuple[JobScript, ...] = (
    JobScript(
        "train_22b",
        "Benchmark, 5 steps of GPT 22B on 128 GCDs: TP4 x PP8 x DP4",
        "configs/runs/train_22b.yaml",
        16,
        minutes=30,
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript(
        "train_175b",
        "Benchmark, 5 steps of GPT 175B on 1024 GCDs: TP4 x PP16 x DP16",
        "configs/runs/train_175b.yaml",
        128,
        minutes=90,
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript(
        "train_1t",
        "Benchmark, 5 steps of GPT 1T on 3072 GCDs: TP8 x PP64 x DP6",
        "configs/runs/train_1t.yaml",
        384,
        minutes=120,
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript("pretrain_22b", "Train GPT 22B on 128 GCDs: TP4 x PP8 x DP4", "configs/runs/pretrain_22b.yaml", 16),
    JobScript(
        "pretrain_175b",
        "Train GPT 175B on 1024 GCDs: TP4 x PP16 x DP16",
        "configs/runs/pretrain_175b.yaml",
        128,
        warning_s=warning_s(step_s=427, save_s=40),
    ),
    JobScript(
        "pretrain_1t",
        "Train GPT 1T on 3072 GCDs: TP8 x PP64 x DP6",
        "configs/runs/pretrain_1t.yaml",
        384,
        warning_s=warning_s(step_s=853, save_s=120),
    ),
    JobScript(
        "train_small",
        "A first try: 15M parameters on one node, TP2 x PP2 x DP2",
        "configs/runs/train_small.yaml",
        1,
        minutes=30,
    ),
    JobScript(
        "weak_scaling",
        "One point of the weak series: sbatch -N NODES; the global batch grows with the nodes",
        "configs/runs/weak_scaling.yaml",
        128,
        minutes=120,  # the site's limit for small jobs, enough for ten steps of at most 427 s each
        program="frontier_llm.experiments.scaling.point",
        words=("weak",),
    ),
    JobScript(
        "strong_scaling",
        "One point of the strong series: sbatch -N NODES; the global batch is constant",
        "configs/runs/strong_scaling.yaml",
        128,
        # enough for ten steps on 128 nodes or more, and for eight on 64; for fewer nodes, reduce the batch or use
        # --partition=extended
        minutes=120,
        program="frontier_llm.experiments.scaling.point",
        words=("strong",),
    ),
    JobScript(
        "weak_series",
        "A weak series in one allocation, smallest point first: sbatch -N NODES; arguments: --nodes 16,32,64 "
        "[--spares N]",
        "configs/runs/weak_scaling.yaml",
        64,
        program="frontier_llm.cli.main",
        words=("scaling", "weak", "--in-job", "--run"),
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript(
        "strong_series",
        "A strong series in one allocation, smallest point first: sbatch -N NODES; arguments: --nodes 64,128,256 "
        "[--spares N]",
        "configs/runs/strong_scaling.yaml",
        256,
        program="frontier_llm.cli.main",
        words=("scaling", "strong", "--in-job", "--run"),
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript(
        "tune",
        "Search the fastest layout of GPT 22B with trials of ten steps; again: slurm/tune.sbatch --max-node-hours H",
        "configs/runs/train_22b.yaml",
        16,
        program="frontier_llm.cli.main",
        words=("tune",),
        warning_s=BENCHMARK_WARNING_S,
    ),
    JobScript(
        "tokenize",
        "Tokenize on all nodes of the job, then join the parts; submit the same command again to continue",
        nodes=4,
        program="frontier_llm.cli.main",
        words=("data", "tokenize", "--in-job"),
        warning_s=BENCHMARK_WARNING_S,
        arguments="INPUT ... --tokenizer TOKENIZER --output PREFIX",
    ),
    JobScript(
        "evaluate",
        "Evaluate each checkpoint of a run beside the run, until the run has ended",
        program="frontier_llm.cli.main",
        words=("evaluate", "--follow"),
        warning_s=BENCHMARK_WARNING_S,
        arguments="RUN_DIR [parallel.tensor=N ...] [--task NAME=FILE ...]",
    ),
    JobScript(
        "export",
        "Write a checkpoint as a Hugging Face model",
        program="frontier_llm.cli.main",
        words=("checkpoint", "export-hf"),
        needs_rank_python=True,
        warning_s=BENCHMARK_WARNING_S,
        arguments="RUN_DIR DIRECTORY [--dtype bf16]",
    ),
)

_TEMPLATE = """\
#!/bin/bash
# {about}
{usage}{directives}
set -euo pipefail

root="${{FRONTIER_LLM_ROOT:-${{SLURM_SUBMIT_DIR:?start this with sbatch}}}}"
if [[ ! -x "$root/launch/job.sh" ]]; then
    echo "no launch/job.sh in $root: run sbatch from the checkout, or export FRONTIER_LLM_ROOT" >&2
    exit 2
fi
exec "$root/launch/job.sh" "${{FRONTIER_LLM_SITE:-{site}}}" \\
    {command} "$@"
"""


def directives(job: JobScript, site: Site) -> list[tuple[str, str]]:
    """Return the sbatch options of a job at a site, in order. '' is an option without a value.

    Raises ConfigError if a value has a character that would end or split a word of an #SBATCH line.
    """
    minutes = job.minutes or site.max_minutes(job.nodes)
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(site.tasks_per_node),
        "cpus-per-task": str(site.cpus_per_task),
        "gpus-per-node": str(site.gpus_per_node),
    }
    if site.default_partition:
        options["partition"] = site.default_partition
    if minutes:
        options["time"] = format_walltime(minutes)
    # every rank gets this signal before the walltime (Slurm may be up to 60 s early) and saves
    options["signal"] = f"USR1@{job.signal_s(site)}"
    options["requeue"] = ""
    options["open-mode"] = "append"  # a requeued job continues the same file
    options["no-kill"] = ""  # a dead node ends the step, not the allocation, so that a spare can replace it
    options["output"] = "%x-%j.out"
    options |= site.sbatch
    bad = [
        f"--{name}={value}"
        for name, value in options.items()
        if not _PLAIN.fullmatch(value) or not re.fullmatch(r"[a-z-]+", name)
    ]
    if bad:
        raise ConfigError(
            f"characters that are not allowed: {', '.join(bad)}",
            "use letters, digits and . , : / + = @ % [ ] -",
            f"sbatch options of {site.name}",
        )
    return list(options.items())


def render(job: JobScript, site: Site) -> str:
    """Return the complete script. Raises ConfigError for text that could end its comment line."""
    if not job.about.isprintable():
        raise ConfigError(f"{job.about!r} has characters that cannot be printed", "give the model a plain name", "job")
    lines = [f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}" for name, value in directives(job, site)]
    account = "-A PROJECT " if site.account == "required" else ""
    usage = (
        f"#     sbatch {account}slurm/{job.name}.sbatch {job.arguments}\n"
        f"# Rendered from slurm/sites/{site.name}.yaml by `python -m frontier_llm.cluster.sbatch`; change that and "
        f"render again.\n"
    )
    return _TEMPLATE.format(
        about=job.about,
        usage="" if job.run_dir else usage,
        site=site.name,
        directives="\n".join(lines),
        command=job.command(site),
    )


def render_site(site: Site) -> str:
    """Return the script with a site's modules and environment, which launch/job.sh sources."""
    lines = [
        f"# Modules and environment of {site.name}, sourced by launch/job.sh.",
        f"# Rendered from slurm/sites/{site.name}.yaml by `python -m frontier_llm.cluster.sbatch`; change that and "
        f"render again.",
        "# shellcheck shell=bash disable=SC2034",
    ]
    lines += [f"module use {shlex.quote(path)}" for path in site.module_paths]
    lines += [_module_load(module) for module in site.modules]
    if site.modules:
        reason = "# launch/job.sh takes these values for the modules', not the user's"
        lines.append(f'FRONTIER_LLM_FROM_MODULES="$(export -p)" {reason}')
    if site.unset:
        lines.append("unset " + " ".join(_names(site.unset, "unset")))
    lines.append(f"export FRONTIER_LLM_BIND={site.bind}")
    lines.append(f"export FRONTIER_LLM_NODE_LOCAL={_expandable(site.node_local)}")
    if site.proxy is not None:
        for name in ("http_proxy", "https_proxy"):
            lines.append(f'export {name}="${{{name}:-{site.proxy}}}"')
        # the ranks' connections to each other must not pass the proxy
        lines.append('export no_proxy="${no_proxy:-localhost,127.0.0.1}"')
    for name in _names(site.environment, "environment"):
        lines.append(f"export {name}={_expandable(site.environment[name])}")
    if site.container:
        if not _PLAIN.fullmatch(site.container):
            raise ConfigError(f"{site.container!r} is not a plain path", where=f"container of {site.name}")
        lines.append(f'export FRONTIER_LLM_CONTAINER="${{FRONTIER_LLM_CONTAINER:-{site.container}}}"')
    return "\n".join(lines) + "\n"


def _module_load(module: str) -> str:
    """Return shell lines that load a module. They use `return`, because users may source the file in their shell."""
    message = shlex.quote(f"the module {module} cannot be loaded")
    return f"module load {shlex.quote(module)} || {{\n    echo {message} >&2\n    return 2\n}}"


def _names(names: Iterable[str], where: str) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(f"{name!r} is not the name of a variable", where=where)
    return list(names)


def _expandable(value: str) -> str:
    """Return a shell word in which only $NAME is expanded. An unset name is empty (`set -u` is on)."""
    pieces = re.split(r"(\$[A-Za-z_][A-Za-z0-9_]*)", value)
    if len(pieces) == 1:
        return shlex.quote(value)
    quoted = [
        f"${{{piece[1:]}:-}}" if piece.startswith("$") else re.sub(r'([\\"`$])', r"\\\1", piece) for piece in pieces
    ]
    return '"' + "".join(quoted) + '"'


def render_bind_script(node: Sequence[Place] = NODE) -> str:
    """Return the script that binds a task to the cores near the GCD of its local rank and runs the given command."""
    count = len(node)
    return f"""\
#!/bin/bash
# Pin this task to the cores and memory beside its GCD: local rank = GCD. Usage: bind_gcd.sh COMMAND [ARGUMENT ...]
# Rendered from frontier_llm/machine/affinity.py by `python -m frontier_llm.cluster.sbatch`; change that and render
# again.
set -euo pipefail

local_rank="${{SLURM_LOCALID:-${{OMPI_COMM_WORLD_LOCAL_RANK:-${{PALS_LOCAL_RANKID:-${{LOCAL_RANK:-}}}}}}}}"
: "${{local_rank:?no launcher set a local rank}}"
cores=({" ".join(f"{place.usable_cores[0]}-{place.usable_cores[-1]}" for place in node)})
numa=({" ".join(str(place.numa) for place in node)})

if [[ "$local_rank" -ge {count} ]]; then
    echo "bind_gcd.sh: local rank $local_rank on a node of {count} GCDs; start {count} tasks per node" >&2
    exit 2
fi
if command -v numactl >/dev/null; then
    exec numactl --physcpubind="${{cores[local_rank]}}" --preferred="${{numa[local_rank]}}" -- "$@"
fi
exec taskset --cpu-list "${{cores[local_rank]}}" "$@"
"""


def rendered_files() -> dict[Path, str]:
    """Return path, relative to the checkout, and content of every generated file."""
    files = {Path("slurm") / f"{job.name}.sbatch": render(job, load_site(job.site)) for job in JOBS}
    files |= {Path("slurm") / "sites" / f"{name}.sh": render_site(load_site(name)) for name in site_names()}
    files[Path("launch") / "bind_gcd.sh"] = render_bind_script()
    return files


def main(arguments: list[str]) -> int:
    """Write the generated files.

    With --check, write nothing, and print the files that differ from the generated text.
    """
    stale = []
    for relative, text in rendered_files().items():
        path = root_dir() / relative
        if "--check" in arguments:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(str(relative))
        else:
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if path.suffix != ".sh" or path.parent.name == "launch" else 0o644)
    for relative_name in stale:
        print(f"{relative_name} is missing or not current; run python -m frontier_llm.cluster.sbatch", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
