"""The next command that scripts/quickstart.sh prints starts a new run.

It does not continue a run whose learning rate has decayed.
"""

from __future__ import annotations

import re
from pathlib import Path

from frontier_llm.config import load_run, warmup_note

SCRIPT = (Path(__file__).resolve().parents[3] / "scripts" / "quickstart.sh").read_text(encoding="utf-8")


def test_the_next_command_starts_a_run_of_its_own() -> None:
    words = re.search(r'next="frontier-llm train (.*?)  +#', SCRIPT)
    assert words
    settings = [word for word in words[1].split() if "=" in word]
    (folder,) = (word.partition("=")[2] for word in settings if word.startswith("train.run_dir="))
    assert "$" not in folder and folder not in re.findall(r"run_dir=(\S+)", SCRIPT.replace(words[0], ""))
    assert not warmup_note(load_run("quickstart", settings))
