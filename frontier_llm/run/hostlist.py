"""Parse and write Slurm's host list syntax: `frontier[00001-00003,00010]` ↔ four names. Calls no `scontrol` and no DNS.

The module uses no library, because python-hostlist has the GPL license and ClusterShell is a complete administration
framework.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import groupby, product, zip_longest

from frontier_llm.errors import FrontierError

# about ten times the largest machine (Frontier: 9856 nodes); guards against `n[1-999999999]`
MAX_HOSTS = 100_000


_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # up to a comma outside of brackets
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand(text: str) -> tuple[str, ...]:
    """Return the names in a host list, in Slurm's order: 'n[0-1,7],login1' -> ('n0', 'n1', 'n7', 'login1').

    Raises FrontierError for unbalanced brackets, an empty or reversed range, or more than MAX_HOSTS names. Names are
    counted before the list is built.
    """
    if set("[]") & set(_ITEM.sub("", text)):
        raise FrontierError(
            "has an opening or closing bracket without its partner", "write e.g. n[0-3,8]", _shorten(text)
        )
    hosts: list[str] = []
    for item in filter(None, map(str.strip, _ITEM.findall(text))):
        pieces = _BRACKETS.split(item)  # alternately text and the content of brackets
        choices = [[_range(part.strip(), text) for part in inside.split(",")] for inside in pieces[1::2]]
        if len(hosts) + math.prod(sum(len(numbers) for numbers, _ in choice) for choice in choices) > MAX_HOSTS:
            raise FrontierError(f"names more than {MAX_HOSTS} hosts", where=_shorten(text))
        digits = [[str(number).zfill(width) for numbers, width in choice for number in numbers] for choice in choices]
        hosts += ["".join(map("".join, zip_longest(pieces[::2], chosen, fillvalue=""))) for chosen in product(*digits)]
    return tuple(hosts)


def first(text: str) -> str:
    """Return the first name of a host list. Slurm's block and cyclic distributions place rank 0 on that node."""
    hosts = expand(text)
    if not hosts:
        raise FrontierError("the host list is empty", "check SLURM_STEP_NODELIST", "host list")
    return hosts[0]


def compress(hosts: Iterable[str]) -> str:
    """Return the shortest host list for `--exclude` and `--nodelist`: ('n0', 'n1', 'n7') -> 'n[0-1,7]'.

    The names are sorted and without repeats.
    """
    split = sorted(
        {_split_number(host) for host in hosts},
        key=lambda part: (part[0], len(part[1]), int(part[1] or -1)),
    )
    items = []
    for (prefix, _width), members in groupby(split, key=lambda part: (part[0], len(part[1]))):
        numbers = [number for _, number in members]
        if numbers == [""]:
            items.append(prefix)
            continue
        ranges = _ranges(numbers)
        bare = len(ranges) == 1 and "-" not in ranges[0]
        items.append(f"{prefix}{ranges[0]}" if bare else f"{prefix}[{','.join(ranges)}]")
    return ",".join(items)


def _ranges(numbers: list[str]) -> list[str]:
    """Return sorted digit strings of equal width as ranges: ['08', '09', '11'] -> ['08-09', '11']."""
    ranges = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: int(pair[1]) - pair[0]):
        members = [number for _, number in run]
        ranges.append(members[0] if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ranges


def _split_number(host: str) -> tuple[str, str]:
    prefix = host.rstrip("0123456789")
    return prefix, host.removeprefix(prefix)


def _range(part: str, text: str) -> tuple[range, int]:
    """Return the numbers of a range such as '08-11', and their minimum number of digits."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
    if match is None:
        raise FrontierError(f"{part!r} is not a number or a range", "write e.g. n[0-3,8]", _shorten(text))
    start = int(match[1])
    stop = int(match[2] or match[1])
    if stop < start or stop - start >= MAX_HOSTS:
        raise FrontierError(
            f"the range {part!r} is reversed or names more than {MAX_HOSTS} hosts",
            where=_shorten(text),
        )
    return range(start, stop + 1), len(match[1])


def _shorten(text: str) -> str:
    return f"host list {text[:80]!r}" + ("…" if len(text) > 80 else "")
