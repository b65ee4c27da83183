"""Mutated manifests and shard headers: typed errors only, in bounded time and memory, and no path outside the checkpoint is opened."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import load
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.manifest import DamagedCheckpoint, parse
from frontier_llm.errors import CheckpointError
from tests.unit.checkpoint.simulated import TINY, Layout, buckets_of, optimizer_of, write

MANIFESTS, HEADERS = 10_000, 300
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.5, 1e308, "", "../../../etc/passwd", "/etc/passwd", "shard_00000.safetensors",
    "shard_00001.safetensors\x00", "shard_00001.safetensors/../..", "é" * 100, "a" * 100_000, [], [[]], {}, [0] * 1000, [2**40] * 8, [1] * 9,
]  # fmt: skip


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, inner in items for path in paths(inner, (*prefix, key)))]


def mutate(content: Any, rng: random.Random, places: list[tuple]) -> bytes:
    """One to three changes of the tree, or of the text."""
    text = json.dumps(content)
    if rng.random() < 0.3:
        damaged = bytearray(text.encode())
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(damaged))
            choice = rng.randrange(4)
            if choice == 0:
                damaged[position] = rng.randrange(256)
            elif choice == 1:
                del damaged[position : position + rng.randint(1, 50)]
            elif choice == 2:
                damaged[position:position] = rng.choice([b"[" * 5000, b"{", b'"', b"1e999", b"\xff\xfe", b"NaN"])
            else:
                damaged = damaged[:position]
            if not damaged:
                break
        return bytes(damaged)
    tree = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        *parents, leaf = rng.choice(places[1:])
        target = tree
        try:
            for key in parents:
                target = target[key]
            if rng.random() < 0.25:
                del target[leaf]
            elif rng.random() < 0.3 and isinstance(target, dict):
                target[f"{leaf}x"] = rng.choice(NASTY)
            else:
                value = target[leaf]
                small = isinstance(value, int) and rng.random() < 0.5
                target[leaf] = value + rng.choice([-1, 1, 8, 1000]) if small else rng.choice(NASTY)
        except (KeyError, IndexError, TypeError):
            continue
    return json.dumps(tree).encode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    write(TINY, Layout(tp=2), directory, config={"model": {"name": "x"}})
    return directory / "step_00000007"


def test_mutated_manifests(checkpoint: Path) -> None:
    content = json.loads((checkpoint / folder.MANIFEST).read_text())
    rng, places = random.Random(7), paths(content)
    optimizer = optimizer_of(buckets_of(TINY, Layout(), 0), filled=False)
    opened: set[str] = set()
    watching = [True]
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if watching[0] and event == "open" else None)
    before_kib, refused, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0
    for _ in range(MANIFESTS):
        data = mutate(content, rng, places)
        started = time.perf_counter()
        try:
            manifest = parse(data, "manifest.json")
            # what still parses, because the digest of manifest.sha256 is not looked at here, must load or fail as orderly
            refused += bool(load.read_shards(checkpoint, manifest, optimizer, 0, 1))
        except CheckpointError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - started)
    watching[0] = False
    assert str(checkpoint / "shard_00000.safetensors") in opened
    assert refused > 0.9 * MANIFESTS
    assert slowest < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024
    assert {Path(path).parent for path in opened if path.startswith("/") or ".." in path} <= {checkpoint}


def test_mutated_headers(checkpoint: Path) -> None:
    path = checkpoint / "shard_00000.safetensors"
    content = path.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(3)
    for _ in range(HEADERS):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 5)):
            position = rng.randrange(8 if rng.random() < 0.3 else header_bytes)
            damaged[position] ^= rng.randint(1, 255)
        if damaged == content:
            continue
        path.write_bytes(damaged)
        assert [problem.where for problem in verify(checkpoint)] == [str(path)]
    path.write_bytes(content)
    assert verify(checkpoint) == []


@pytest.mark.parametrize(
    "file", ["../shard_00000.safetensors", "/etc/passwd", "shard_00000.safetensors/x", "shard_1.safetensors", "shard_00000.bin"]
)
def test_names_that_are_no_shard_are_refused_although_the_digest_is_right(file: str, checkpoint: Path, tmp_path: Path) -> None:
    content = json.loads((checkpoint / folder.MANIFEST).read_text())
    content["shards"][0]["file"] = file
    data = json.dumps(content).encode()
    forged = tmp_path / "step_00000007"
    forged.mkdir()
    (forged / folder.MANIFEST).write_bytes(data)
    (forged / folder.MANIFEST_DIGEST).write_text(f"{hashlib.sha256(data).hexdigest()}  manifest.json\n")
    with pytest.raises(DamagedCheckpoint, match="is not the name of a shard"):
        folder.read_manifest(forged)
