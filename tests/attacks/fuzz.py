"""Changes input files at random and checks their readers: only typed errors, limited time and memory, and no access
outside the given folder.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from frontier_llm.errors import FrontierError

# Numbers of random cases for the tests of each kind of file. They add up to 10,000 cases.
MANIFESTS = 6_900
HEADERS = 500
INDICES = 2_000
RUN_FILES = 600
OTHERS = 60  # number of cases for each of the other readers
MOST_GROWTH_KIB = 200 * 1024

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    10**40,
    0.5,
    1e308,
    "",
    "../../../etc/passwd",
    "/etc/passwd",
    "shard_00000.safetensors",
    "shard_00001.safetensors\x00",
    "shard_00001.safetensors/../..",
    "é" * 100,
    "a" * 100_000,
    [],
    [[]],
    {},
    [0] * 1000,
    [2**40] * 8,
    [1] * 9,
]


def paths(value: Any, prefix: tuple = ()) -> list[tuple]:
    """Return the paths of keys to all nodes of a JSON tree."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(path for key, inner in items for path in paths(inner, (*prefix, key)))]


def mutate(content: Any, rng: random.Random, places: list[tuple]) -> bytes:
    """Return the tree as JSON text with one to three changes of the tree or of the text."""
    text = json.dumps(content)
    return (
        mutate_bytes(text.encode(), rng)
        if rng.random() < 0.3
        else json.dumps(_mutate_tree(json.loads(text), rng, places)).encode()
    )


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Apply one to four random changes: replace a byte, delete or insert a range of bytes, or truncate."""
    damaged = bytearray(content)
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


def _mutate_tree(tree: Any, rng: random.Random, places: list[tuple]) -> Any:
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
    return tree


_opened: list[set[str]] = []  # files opened by the reader under test; empty outside a test


def _note(event: str, args: tuple) -> None:
    if _opened and event == "open":
        _opened[-1].add(str(args[0]))


sys.addaudithook(_note)


@cache
def most_cpu_s() -> float:
    """Return the CPU seconds that one case may take: twenty times the seconds for parsing a valid YAML list of 20,000
    characters.

    The seconds are measured in this process, so that the bound follows the speed of the machine. If a reader has no
    limit, its case takes far longer than this bound.
    """
    started_s = time.process_time()
    yaml.safe_load("[" + "1," * 10_000 + "]")
    return 20 * (time.process_time() - started_s)


def refused(what: str, read: Callable[[bytes], bool], cases: list[bytes], folders: set[Path]) -> int:
    """Return the number of cases that `read` refuses, by a FrontierError or by returning True.

    Other exceptions are passed on. Prints and asserts the bounds on time and memory.
    Asserts that only files in `folders` were opened.
    """
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = 0
    slowest_s = 0.0
    _opened.append(set())
    try:
        for case in cases:
            started_s = time.process_time()  # CPU time, so that other processes on the machine do not count
            try:
                count += bool(read(case))
            except FrontierError:
                count += 1
            slowest_s = max(slowest_s, time.process_time() - started_s)
    finally:
        opened = _opened.pop()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    largest = max(map(len, cases))
    print(
        f"{what}: {count} of {len(cases)} refused, up to {largest:,} bytes each; at most {slowest_s:.3f} of "
        f"{most_cpu_s():.1f} CPU seconds, "
        f"{grown_kib / 1024:.0f} of {MOST_GROWTH_KIB / 1024:.0f} MiB"
    )
    assert slowest_s < most_cpu_s()
    assert grown_kib < MOST_GROWTH_KIB
    outside = [path for path in opened if (path.startswith("/") or ".." in path) and Path(path).parent not in folders]
    # Python opens the file of a codec when the codec is first used.
    strange = [path for path in outside if not path.startswith(sys.base_prefix)]
    assert strange == [], strange
    return count
