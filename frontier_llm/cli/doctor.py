"""frontier-llm doctor: check this node before a run, or all nodes of a Slurm allocation."""

from __future__ import annotations

import argparse
from pathlib import Path

from frontier_llm.cli.arguments import JSON, command, option, positive, show
from frontier_llm.cli.settings import refuse_settings


@command(
    option("--site", help="name or path of a site file (default: FRONTIER_LLM_SITE, else generic)"),
    option(
        "--run",
        metavar="RUN",
        help="run file; its run directory must be writable and have free space for two checkpoints",
    ),
    option("overrides", metavar="key=value", nargs="*", help="with --run: changes to the run"),
    option(
        "--run-dir",
        default=".",
        metavar="DIR",
        help="directory to check when no run is given (default: the current one)",
    ),
    option("--this-node", action="store_true", help="only this node, also inside an allocation"),
    option(
        "--installation",
        action="store_true",
        help=(
            "check only what is installed in the Python interpreter of the ranks, for example on a login node, which "
            "has no GPU"
        ),
    ),
    option(
        "--timeout",
        type=positive,
        default=45,
        metavar="SECONDS",
        help="a node that does not answer within this time is bad (default: 45)",
    ),
    option(
        "--emit-machine",
        type=Path,
        metavar="FILE",
        help=(
            "machine file to write for plan: the site's machine with the ranks' method of adding weight gradients, "
            "which is tested on a GPU of this node"
        ),
    ),
    option("--system-root", default="/", help=argparse.SUPPRESS),
    JSON,
    about="Check GCDs and their memory, cores, network interfaces, libfabric, RCCL's network plugin, clocks, "
    "filesystems, and that all nodes have equal environments. Check what is installed in the interpreter of the "
    "ranks: torch, C++ libraries and GPU kernels; with --run also its op back-ends, data and tokenizer. List the "
    "environment variables of the ranks and their sources. Inside a Slurm allocation all nodes are checked, and bad "
    "nodes are listed in the form that --exclude accepts.",
    examples=(
        "frontier-llm doctor --site frontier --this-node",
        "frontier-llm doctor --site lumi --run train_175b --json",
        "frontier-llm doctor --site frontier --installation --emit-machine mine.yaml",
    ),
)
def doctor(args: argparse.Namespace) -> int:
    """Return exit code 0 if nothing fatal was found, else 1."""
    from dataclasses import asdict, replace

    from frontier_llm import log
    from frontier_llm.cluster.disk import needed_bytes
    from frontier_llm.cluster.doctor import examine
    from frontier_llm.cluster.probe import Settings
    from frontier_llm.cluster.readiness import installation_problems
    from frontier_llm.cluster.site_state import requeue_note
    from frontier_llm.cluster.site_variables import expected_settings
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.machine.env import environment
    from frontier_llm.machine.precision import load_resolved
    from frontier_llm.run import hostlist
    from frontier_llm.run.rank_env import environ
    from frontier_llm.topology.rank_variables import environment_name, run_variables

    if not args.run:
        refuse_settings(args.overrides, lambda key: True, "name the run that it changes: --run RUN")
    site = load_site(args.site)
    directory = Path(args.run_dir)
    checkpoint_bytes = 0
    config = load_resolved(args.run, [f"machine={site.machine}", *args.overrides]) if args.run else None
    if config is not None:
        directory = Path(config.train.run_dir)
        checkpoint_bytes = needed_bytes(config)
    installed = installation_problems(site, config, directory.resolve())
    for point in installed.open_points:
        log.info(point)
    if note := requeue_note():
        log.warn(note)
    if args.installation:
        is_healthy = not installed.problems
        show(args, asdict(installed), installed.render)
    else:
        nodelist = None if args.this_node else environ("SLURM_JOB_NODELIST")
        if nodelist is None and not args.this_node:
            log.info("not inside an allocation (salloc, sbatch): only this machine is examined")
        settings = Settings(site=site, run_dir=str(directory.resolve()), system_root=args.system_root)
        report = examine(settings, hostlist.expand(nodelist or ""), checkpoint_bytes, args.timeout)
        nodes = len(report.hosts)
        wanted = run_variables(config, nodes) if config else environment(environment_name(site.machine), nodes)
        report = replace(report, variables=tuple(expected_settings(wanted, site)), installation=installed)
        is_healthy = report.healthy
        show(args, report.as_dict(), report.render)
    if args.emit_machine is not None:
        _write_machine(args.emit_machine, site.machine, installed.weight_gradients)
    return 0 if is_healthy else 1


def _write_machine(path: Path, machine: str, method: str) -> None:
    """Write a machine file with the method of adding weight gradients. Raises FrontierError if it is not known."""
    from frontier_llm import log
    from frontier_llm.errors import FrontierError
    from frontier_llm.experiments.measure.machine_file import weight_gradients_content, write_machine

    if not method:
        raise FrontierError(
            "the method of adding weight gradients is not known, because the ranks' torch sees no GPU here",
            "run doctor in a step with a GPU, for example srun -n1 --gpus-per-node=8 frontier-llm doctor …",
            "--emit-machine",
        )
    write_machine(path, weight_gradients_content(machine, method))
    log.info(f"wrote {path}; use it with `frontier-llm plan MODEL --machine {path}`")
