"""frontier-llm bench step|ops|comm: measurements as text or JSON."""

from __future__ import annotations

from frontier_llm.cli.arguments import Command
from frontier_llm.cli.bench_comm import comm
from frontier_llm.cli.bench_ops import ops
from frontier_llm.cli.bench_step import step

bench = Command(
    about=(
        "Measure on this machine. Under srun, mpirun or torchrun the launcher's ranks measure; otherwise local ranks "
        "are started."
    ),
    examples=("frontier-llm bench step quickstart --json", "frontier-llm bench comm train_small --max 1MiB"),
    actions={"step": step, "comm": comm, "ops": ops},
    metavar="BENCH",
)
