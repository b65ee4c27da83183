"""Random changes of manifests and shard headers.

Only typed errors are raised, within the bounds on time and memory. No path outside the checkpoint is opened
(tests/attacks/fuzz.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.manifest import parse
from tests.attacks.fuzz import HEADERS, MANIFESTS, mutate, paths, refused
from tests.unit.checkpoint.simulated import TINY, Layout, buckets_of, optimizer_of, write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    write(TINY, Layout(tp=2), directory, config={"model": {"name": "x"}})
    return directory / "step_00000007"


def test_mutated_manifests(checkpoint: Path) -> None:
    content = json.loads((checkpoint / folder.MANIFEST).read_text())
    rng = random.Random(7)
    places = paths(content)
    optimizer = optimizer_of(buckets_of(TINY, Layout(), 0), filled=False)

    def read(data: bytes) -> bool:
        # The digest in manifest.sha256 is not checked here. A manifest that still parses must load or raise a typed
        # error.
        return bool(load.read_shards(checkpoint, parse(data, "manifest.json"), optimizer, 0, 1))

    cases = [mutate(content, rng, places) for _ in range(MANIFESTS)]
    assert refused("manifests", read, cases, {checkpoint}) > 0.9 * MANIFESTS
    assert not read(json.dumps(content).encode())


def test_mutated_headers(checkpoint: Path) -> None:
    path = checkpoint / "shard_00000.safetensors"
    content = path.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(3)

    def damage() -> bytes:
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(8 if rng.random() < 0.3 else header_bytes)] ^= rng.randint(1, 255)
        return bytes(damaged)

    def read(data: bytes) -> bool:
        path.write_bytes(data)
        return [problem.where for problem in verify(checkpoint)] == [str(path)]

    cases = [case for case in (damage() for _ in range(HEADERS)) if case != content]
    assert refused("headers of shards", read, cases, {checkpoint}) == len(cases) > 0.99 * HEADERS
    path.write_bytes(content)
    assert verify(checkpoint) == []
