#!/usr/bin/env python3
"""Writes the planner's save interval (Young/Daly) into configs/runs/pretrain_*.yaml.

python scripts/pretrain_intervals.py [--check]      --check: exit 1 if a file has another interval
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from frontier_llm.cluster.sbatch import JOBS
from frontier_llm.cluster.sites import load_site, root_dir
from frontier_llm.config import load_run
from frontier_llm.config.phases import PRODUCTION
from frontier_llm.planner.predict import planned_saves


def expected_line(path: Path, nodes: int, site: str) -> str:
    """Return the line `save_interval: …` of a run file, for a job of `nodes` nodes at a site."""
    config = load_run(str(path))
    ranks = nodes * load_site(site).tasks_per_node
    saves = planned_saves(config, ranks)
    assert saves is not None, f"{config.machine} has no operations data"
    minutes = round(saves.interval_s / 60)
    return (
        f"  save_interval: {saves.interval_steps}  # Young/Daly, by scripts/pretrain_intervals.py: every "
        f"{minutes} minutes"
    )


def expected_files() -> dict[Path, str]:
    """Return each production run file and its text with the planner's interval."""
    files = {}
    for job in JOBS:
        if job.name in PRODUCTION.values():
            path = root_dir() / job.config
            line = expected_line(path, job.nodes, job.site)
            text = path.read_text(encoding="utf-8")
            files[path] = re.sub(r"^  save_interval: .*$", line, text, flags=re.MULTILINE)
    return files


def main() -> int:
    """Write the files. With --check, only compare the files with the expected text."""
    stale = [(path, text) for path, text in expected_files().items() if path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if "--check" in sys.argv[1:]:
            print(f"{path} has another save interval; run python scripts/pretrain_intervals.py", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
