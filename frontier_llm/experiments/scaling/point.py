"""Runs one point of a scaling series inside its Slurm job.

    python -m frontier_llm.experiments.scaling.point weak|strong CONFIG [key=value …]

slurm/weak_scaling.sbatch and slurm/strong_scaling.sbatch start this module through launch/job.sh. In a weak series,
batch.global_batch of the run file means the batch of one replica. The run directory is
TRAIN.RUN_DIR/MODE_MODEL_nodesNNNNN_jJOB. `frontier-llm scaling report TRAIN.RUN_DIR` collects the results of all
points.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from frontier_llm.cluster import slurm, supervisor
from frontier_llm.cluster.admission import admit_start
from frontier_llm.cluster.batch import settings_of_variables, split_settings, working_nodes
from frontier_llm.cluster.sites import load_site
from frontier_llm.errors import FrontierError
from frontier_llm.experiments.scaling.series import MODES, announce, make_point
from frontier_llm.machine.precision import load_resolved


def main(words: Sequence[str]) -> int:
    """Derive the point from the allocation, record it, and run it once. A failed point is not repeated."""
    if len(words) < 2 or words[0] not in MODES:
        print(
            "usage: python -m frontier_llm.experiments.scaling.point weak|strong CONFIG [key=value ...]",
            file=sys.stderr,
        )
        return 2
    mode = MODES[MODES.index(words[0])]
    try:
        allocation = slurm.Allocation.from_environment()
        typed, overrides = split_settings(words[2:])
        config = load_resolved(words[1], overrides)
        settings = {**settings_of_variables(notice=False), **typed}
        nodes = working_nodes(settings, len(allocation.nodes))
        site = load_site().model_copy(update={"tasks_per_node": allocation.tasks_per_node})
        name = f"{mode}_{config.model.name}_nodes{nodes:05}_j{allocation.job_id}"
        directory = Path(config.train.run_dir).resolve() / name
        batch = config.batch.global_batch
        point = make_point(mode, config, site, nodes=nodes, batch=batch, directory=directory)
        announce(point)
    except FrontierError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    own = (f"batch.global_batch={point.config.batch.global_batch}", f"train.run_dir={directory}")
    return supervisor.main([*words[1:], *own], continuation="never", admit=admit_start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
