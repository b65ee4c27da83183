"""Mutated run files: a config that holds, or a FrontierError; nothing else, and quickly."""

from __future__ import annotations

import random
import time
from pathlib import Path

import yaml

from frontier_llm.config import dump, load_run
from frontier_llm.errors import FrontierError
from frontier_llm.topology import plan_problems
from tests.unit.checkpoint.test_fuzz import mutate, paths

RUNS = 600


def test_mutated_run_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-tiny\nbatch: {global_batch: 8}\n")
    content = yaml.safe_load(dump(load_run(str(path))))
    rng, places, refused, slowest = random.Random(5), paths(content), 0, 0.0
    for _ in range(RUNS):
        path.write_bytes(mutate(content, rng, places))  # JSON is YAML
        started = time.perf_counter()
        try:
            refused += bool(plan_problems(load_run(str(path)), 8))
        except FrontierError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - started)
    assert refused > RUNS / 2 and slowest < 5.0
