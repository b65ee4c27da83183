"""frontier-llm doctor: check this node, or inside a Slurm allocation every node of it, before a run starts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

CHECKPOINT_BYTES_PER_PARAMETER = 14  # bf16 weights, fp32 master and both moments (BLOOM measured 13)


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this node or every node of an allocation",
        description="GCDs and memory, cores, network interfaces, libfabric, RCCL's network plugin, equal environments, clocks, filesystems. "
        "Inside a Slurm allocation it asks every node; bad ones are named as --exclude takes them.",
    )
    parser.add_argument("--site", default=None, help="default: FRONTIER_LLM_SITE, else generic")
    parser.add_argument("--run", help="a run file: its directory is checked, with room for two of its checkpoints")
    parser.add_argument("--run-dir", default=".", help="directory to check when no run is given")
    parser.add_argument("--this-node", action="store_true", help="only this node, also inside an allocation")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the nodes")
    parser.add_argument("--system-root", default="/", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="machine-readable report on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when nothing fatal was found, else 1."""
    from frontier_llm.cluster import hostlist
    from frontier_llm.cluster.doctor import examine, settings_for
    from frontier_llm.cluster.rank_env import environ
    from frontier_llm.cluster.sites import load_site
    from frontier_llm.config import load_run
    from frontier_llm.costs.parameters import total_parameters

    site = load_site(args.site or environ("FRONTIER_LLM_SITE") or "generic")
    directory, needed_bytes = Path(args.run_dir), 0
    if args.run:
        config = load_run(args.run)
        directory = Path(config.train.run_dir)
        needed_bytes = 2 * CHECKPOINT_BYTES_PER_PARAMETER * total_parameters(config.model)
    nodelist = None if args.this_node else environ("SLURM_JOB_NODELIST")
    report = examine(
        site, settings_for(site, directory.resolve(), args.system_root), hostlist.expand(nodelist or ""), needed_bytes, args.timeout
    )
    print(json.dumps(report.as_dict(), indent=1) if args.json else report.render())
    return 0 if report.healthy else 1
