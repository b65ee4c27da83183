"""Mutated run files and token indices; those of checkpoints are in tests/unit/checkpoint/test_fuzz.py."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import yaml

from frontier_llm.config import configs_dir, dump, load_run
from frontier_llm.data.indexed import IndexedDataset, bin_path, idx_path
from frontier_llm.data.indexed_writer import IndexedWriter
from frontier_llm.topology import plan_problems
from tests.faults.fuzz import HEADERS, INDICES, MANIFESTS, RUN_FILES, mutate, mutate_bytes, paths, refused


def test_all_kinds_together_are_ten_thousand() -> None:
    assert MANIFESTS + HEADERS + INDICES + RUN_FILES == 10_000


def test_mutated_run_files(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: llama-tiny\nbatch: {global_batch: 8}\n")
    content = yaml.safe_load(dump(load_run(str(path))))
    rng, places = random.Random(5), paths(content)

    def read(data: bytes) -> bool:
        path.write_bytes(data)  # JSON is YAML
        return bool(plan_problems(load_run(str(path)), 8))

    folders = {tmp_path, configs_dir() / "models", configs_dir() / "runs"}
    assert refused(read, [mutate(content, rng, places) for _ in range(RUN_FILES)], folders) > RUN_FILES / 2


def test_mutated_indices(tmp_path: Path) -> None:
    prefix, rng = tmp_path / "text", random.Random(9)
    with IndexedWriter(prefix, "uint16") as writer:
        for length in (5, 0, 17, 3, 40):
            writer.add_document(np.arange(length))
    path, tokens = idx_path(prefix), IndexedDataset(prefix).token_count
    content = path.read_bytes()

    def damage() -> bytes:
        if rng.random() < 0.5:
            return mutate_bytes(content, rng)
        damaged = bytearray(content)  # of the same size: past the checks of lengths
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] ^= rng.randint(1, 255)
        return bytes(damaged)

    def read(data: bytes) -> bool:
        path.unlink()  # it may still be mapped
        path.write_bytes(data)
        dataset = IndexedDataset(prefix)
        for index in range(dataset.document_count):
            assert len(dataset.document(index)) <= tokens
        return False

    cases = [case for case in (damage() for _ in range(INDICES)) if case != content]
    accepted = len(cases) - refused(read, cases, {tmp_path})
    assert accepted < 0.05 * INDICES, "only the type's code and a mode may be changed without contradiction"
    assert not read(content) and bin_path(prefix).stat().st_size == 2 * tokens
