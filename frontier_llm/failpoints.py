"""Fault injection for tests: named places in the code at which a test can cause a fault.

A place without an armed rule costs one truth test.

`arm("checkpoint.shard_written@1#2=kill")` kills rank 1 at its second call of `hit("checkpoint.shard_written")`.
A specification is a comma-separated list of `name[@rank][^start][#nth][%]=action[:argument]`. `start` is the number of
the run's start (incarnation). With `%` the action repeats from the nth call on.

Actions: kill (SIGKILL), stop (SIGSTOP), exit:CODE, sleep:SECONDS, errno:NAME (OSError, e.g. errno:ENOSPC), error:TEXT
(RuntimeError), hold:SECONDS (sleeps and holds the interpreter lock), perturb (adds 1 to the first value that is passed
to `hit`), fill:NUMBER (replaces each value that is passed to `hit`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

from frontier_llm import log
from frontier_llm.errors import ConfigError

ACTIONS = ("kill", "stop", "exit", "sleep", "errno", "error", "hold", "perturb", "fill")
_RULE = re.compile(
    r"(?P<name>[\w.]+)(@(?P<rank>\d+))?(\^(?P<start>\d+))?(#(?P<nth>\d+))?(?P<repeat>%)?"
    r"=(?P<action>\w+)(:(?P<argument>.*))?"
)


@dataclass
class _Rule:
    nth: int
    repeat: bool
    action: str
    argument: str
    hits: int = 0


_armed: dict[str, list[_Rule]] = {}


def arm(specification: str, rank: int = 0, start: int = 0) -> None:
    """Replace all armed rules by the rules of the specification that apply to this rank and start.

    '' disarms all. Raises ConfigError for a malformed specification.
    """
    _armed.clear()
    for text in filter(None, specification.split(",")):
        match = _RULE.fullmatch(text.strip())
        if match is None or match["action"] not in ACTIONS:
            raise ConfigError(
                f"{text!r} is not a failpoint",
                f"write name[@rank][^start][#nth][%]=action with an action of {ACTIONS}",
                "failpoints",
            )
        is_rank = match["rank"] is None or int(match["rank"]) == rank
        is_start = match["start"] is None or int(match["start"]) == start
        if is_rank and is_start:
            rule = _Rule(int(match["nth"] or 1), bool(match["repeat"]), match["action"], match["argument"] or "")
            _armed.setdefault(match["name"], []).append(rule)


def hit(name: str, values: Any = None) -> None:
    """Apply the rules that are armed for this place. The actions `perturb` and `fill` change `values`."""
    if _armed:
        for rule in _armed.get(name, ()):
            rule.hits += 1
            if rule.hits == rule.nth or (rule.repeat and rule.hits > rule.nth):
                _act(name, rule, values)


def _act(name: str, rule: _Rule, values: Any) -> None:
    if rule.action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if rule.action == "kill" else signal.SIGSTOP)
    elif rule.action == "exit":
        os._exit(int(rule.argument))
    elif rule.action == "sleep":
        log.warn(f"failpoint {name}: sleeping {rule.argument} s")
        time.sleep(float(rule.argument))
    elif rule.action == "hold":
        ctypes.PyDLL(None).sleep(int(rule.argument))
    elif rule.action == "perturb":
        values[0] += 1
    elif rule.action == "fill":
        values[:] = [float(rule.argument)] * len(values)
    elif rule.action == "errno":
        number = getattr(errno, rule.argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    else:
        raise RuntimeError(f"{rule.argument} (failpoint {name})")
