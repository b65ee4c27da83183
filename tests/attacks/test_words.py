"""Gives unsuitable text to functions that parse words, numbers and host lists. Each function raises a typed error
within a short time.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from frontier_llm.config import load_run
from frontier_llm.errors import ConfigError, FrontierError
from frontier_llm.run import hostlist
from tests.attacks.fuzz import most_cpu_s


@pytest.mark.parametrize("bomb", ["aliases", "merges", "circle", "deep", "long", "wide"])
def test_what_yaml_unfolds_to_is_bounded(tmp_path: Path, bomb: str) -> None:
    start = "&a0 {k0: 1, k1: 2}" if bomb == "merges" else "&a0 [1, 2]"
    step = "{{<<: [{}]}}" if bomb == "merges" else "[{}]"
    lines = [f"x0: {start}"]
    lines += [f"x{n}: &a{n} " + step.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 30)]
    texts = {
        "circle": "a: &a [*a]\n",
        "deep": "a: " + "[" * 100_000 + "\n",
        "long": "a: " + "x" * (1 << 17),
        "wide": "[" + "1," * (1 << 16) + "]",
    }
    path = tmp_path / "run.yaml"
    path.write_text(texts.get(bomb, "\n".join(lines)))
    started_s = time.process_time()
    with pytest.raises(ConfigError, match=r"run\.yaml: (has more|contains|cannot read)"):
        load_run(str(path))
    assert time.process_time() - started_s < most_cpu_s()


@pytest.mark.parametrize(
    "value",
    ["2024-13-45", "2024-01-01", "9" * 5000, "-" + "9" * 400, "1e999", "0x" + "f" * 2000, "\udc80", "\x1b[2J", "[" * 5000, "{a: [", "*a", "!!python/object:os.x", "!!binary x"],  # noqa: E501
)  # fmt: skip
@pytest.mark.parametrize("key", ["train.steps", "optimizer.lr", "train"])
def test_overrides_that_are_no_numbers(key: str, value: str) -> None:
    started_s = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_run("train_small", [f"{key}={value}"])
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\x1b" not in str(caught.value) and time.process_time() - started_s < most_cpu_s()


@pytest.mark.parametrize(
    "text",
    ["n[1-999999999]", "n[0-999]x[0-999]", ",".join(["n[0-99999]"] * 100), "n[0-9]" * 50, "n[" + "9" * 5000 + "]"],
)
def test_host_lists_are_counted_before_they_are_made(text: str) -> None:
    started_s = time.process_time()
    with pytest.raises(FrontierError):
        hostlist.expand(text)
    assert time.process_time() - started_s < most_cpu_s()
