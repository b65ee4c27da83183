"""Lists the commands and options that need an optional package, and checks it before a command starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from frontier_llm.errors import ConfigError, not_installed


@dataclass(frozen=True)
class Need:
    """A package that is no requirement of `frontier_llm`.

    `option` is '' if the command always needs the package. If the option `unless` is given, the package is not needed.
    """

    command: str
    option: str
    package: str
    unless: str = ""


NEEDS = (
    Need("plan", "--figures", "plotly"),
    Need("bench comm", "--figures", "plotly"),
    Need("evaluate", "--figures", "matplotlib"),
    Need("tune", "", "scipy", unless="--exhaustive"),
    Need("tune", "--emit-machine", "scipy"),
    Need("checkpoint export-hf", "--push-to-hub", "huggingface_hub"),
    Need("frontier-lm-eval", "", "lm_eval"),
    Need("frontier-lm-eval", "", "torch"),
)

_REMOTE = "train.remote="


def check_installed(words: Sequence[str]) -> None:
    """Raise ConfigError for each package that the typed command needs and that is not installed."""
    typed = {word.partition("=")[0] for word in words}
    needed = [
        row
        for row in NEEDS
        if list(words[: row.command.count(" ") + 1]) == row.command.split()
        and (not row.option or row.option in typed)
        and row.unless not in typed
        and not typed & {"-h", "--help"}
    ]
    wanted = {row.package: row.option or row.command for row in needed} | _of_urls(words)
    missing = [not_installed(package, where) for package, where in wanted.items() if find_spec(package) is None]
    if missing:
        raise ConfigError(missing)


def _of_urls(words: Sequence[str]) -> dict[str, str]:
    """Return package → URL for the URLs in the words at which checkpoints are kept."""
    if not any("://" in word for word in words):
        return {}
    # Imported only here, because the package `config` imports pydantic, which takes longer than all of `--help`.
    from frontier_llm.config.urls import is_url, packages_of, without_secrets

    if words[:1] == ["checkpoint"]:
        urls = [word for word in words if is_url(word)]
    else:
        urls = [word.removeprefix(_REMOTE) for word in words if word.startswith(_REMOTE)]
    return {package: without_secrets(url) for url in urls if is_url(url) for package in packages_of(url)}
