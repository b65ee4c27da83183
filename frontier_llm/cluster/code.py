"""Copies the code that a job will run (the package and its start scripts) when the job is queued."""

from __future__ import annotations

import compileall
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from frontier_llm.cluster.sbatch import render_site
from frontier_llm.cluster.sites import Site, root_dir
from frontier_llm.config import dump

SNAPSHOT = ("launch", "slurm", "configs")


def plugin_places(plugins: Sequence[str]) -> dict[str, Path]:
    """Return plugin file → its path in the snapshot. Plugins that are modules are not copied."""
    files = [name for name in dict.fromkeys(plugins) if name.endswith(".py")]
    return {name: Path("plugins") / str(number) / Path(name).name for number, name in enumerate(files)}


def _job_code(site: Site, plugins: Sequence[str]) -> dict[Path, bytes]:
    """Return the files of a job: path in the snapshot -> content.

    The files come from a checkout, or from an installed package and its share directory. They include the run's plugin
    files and the site as the job reads it, because `--site` can name a file outside of the checkout.
    """
    package = Path(__file__).resolve().parents[1]
    sites = Path("slurm") / "sites"
    roots = {package.name: package, **{name: root_dir() / name for name in SNAPSHOT}}
    files = {
        Path(name) / path.relative_to(root): path
        for name, root in roots.items()
        for path in root.rglob("*")
        if path.is_file()
    }
    code = {
        relative: path.read_bytes() for relative, path in sorted(files.items()) if "__pycache__" not in relative.parts
    }
    code |= {place: Path(name).read_bytes() for name, place in plugin_places(plugins).items()}
    return code | {
        sites / f"{site.name}.yaml": dump(site).encode(),
        sites / f"{site.name}.sh": render_site(site).encode(),
    }


def code_digest(site: Site, plugins: Sequence[str] = ()) -> str:
    """Return the sha256 of the names and contents of a snapshot. Equal code, site and plugins have equal digests."""
    digest = hashlib.sha256()
    for relative, content in _job_code(site, plugins).items():
        digest.update(f"{relative}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def snapshot(target: Path, site: Site, plugins: Sequence[str] = (), *, compiled: bool = True) -> None:
    """Copy the code and the plugin files to `target`. Do nothing if `target` exists.

    The copy appears atomically. With `compiled` it also contains bytecode.
    """
    if target.is_dir():
        return
    partial = target.with_name(f"{target.name}.tmp{os.getpid()}")
    for relative, content in _job_code(site, plugins).items():
        (partial / relative).parent.mkdir(parents=True, exist_ok=True)
        (partial / relative).write_bytes(content)
        if content.startswith(b"#!"):
            (partial / relative).chmod(0o755)
    if compiled:
        compileall.compile_dir(partial, quiet=2)  # now, because ranks write no bytecode (launch/rank.sh)
    partial.rename(target)
