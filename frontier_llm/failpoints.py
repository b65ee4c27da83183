"""Named places in the code where a test may make a fault happen at an exact instant; a dictionary look-up when off.

`arm("checkpoint.shard_written@1#2=kill")` kills rank 1 at the second time that it comes to `hit("checkpoint.shard_written")`.
A specification is a comma-separated list of `name[@rank][#nth][%]=action[:argument]`; `%` repeats from the nth time on.

Actions: kill (SIGKILL), stop (SIGSTOP), exit:CODE, sleep:SECONDS, errno:NAME (OSError, e.g. errno:ENOSPC), error:TEXT (RuntimeError).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass

from frontier_llm.errors import ConfigError

ACTIONS = ("kill", "stop", "exit", "sleep", "errno", "error")
_RULE = re.compile(r"(?P<name>[\w.]+)(@(?P<rank>\d+))?(#(?P<nth>\d+))?(?P<repeat>%)?=(?P<action>\w+)(:(?P<argument>.*))?")


@dataclass
class _Rule:
    nth: int
    repeat: bool
    action: str
    argument: str
    hits: int = 0


_armed: dict[str, list[_Rule]] = {}


def arm(specification: str, rank: int = 0) -> None:
    """Replace what is armed by those rules of the specification that are for this rank; '' disarms. Raises ConfigError."""
    _armed.clear()
    for text in filter(None, specification.split(",")):
        match = _RULE.fullmatch(text.strip())
        if match is None or match["action"] not in ACTIONS:
            raise ConfigError(
                f"{text!r} is not a failpoint", f"write name[@rank][#nth][%]=action with an action of {ACTIONS}", "failpoints"
            )
        if match["rank"] is None or int(match["rank"]) == rank:
            rule = _Rule(int(match["nth"] or 1), bool(match["repeat"]), match["action"], match["argument"] or "")
            _armed.setdefault(match["name"], []).append(rule)


def hit(name: str) -> None:
    """Pass this place; nothing happens unless a rule is armed for it."""
    if _armed:
        for rule in _armed.get(name, ()):
            rule.hits += 1
            if rule.hits == rule.nth or (rule.repeat and rule.hits > rule.nth):
                _act(name, rule)


def _act(name: str, rule: _Rule) -> None:
    if rule.action in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if rule.action == "kill" else signal.SIGSTOP)
    elif rule.action == "exit":
        os._exit(int(rule.argument))
    elif rule.action == "sleep":
        time.sleep(float(rule.argument))
    elif rule.action == "errno":
        number = getattr(errno, rule.argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    else:
        raise RuntimeError(f"{rule.argument} (failpoint {name})")
