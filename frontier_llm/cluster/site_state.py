"""Checks that a site still has the modules and the container image that its site file names.

Sites replace modules and images every few months. A message names the nearest module or image that exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from frontier_llm.cluster import slurm
from frontier_llm.cluster.sites import Site
from frontier_llm.errors import FrontierError, Problem, closest
from frontier_llm.run.rank_env import environ, environment

# prints one module per line; the paths are arguments, so the shell does not interpret their text
_LIST_MODULES = 'for path in "$@"; do module use "$path"; done >/dev/null 2>&1; module -t avail 2>&1'
_IMAGE_LEVELS = 2  # images of a site lie in one folder per version


def site_problems(site: Site) -> Iterator[Problem]:
    """Yield a problem for each module and image of the site file that does not exist."""
    if site.modules:
        existing = available_modules(site.module_paths)
        for module in site.modules:
            if existing and not is_available(module, existing):
                what = f"{site.name} has no module {module}"
                fix = f"correct `modules` in the site file: {_nearest(module, existing)}"
                yield Problem("modules", what, fix)
    image = environ("FRONTIER_LLM_CONTAINER") or site.container
    if image and not Path(image).exists():
        images = [str(path) for path in images_near(Path(image))]
        fix = f"export FRONTIER_LLM_CONTAINER, or correct `container` in the site file: {_nearest(image, images)}"
        yield Problem("container", f"no file {image}", fix)


def available_modules(paths: Sequence[str]) -> list[str]:
    """Return the modules that `module avail` lists, such as 'rocm/6.3.3'. Empty without a module system."""
    try:
        text = slurm.call(["bash", "-c", _LIST_MODULES, "bash", *paths], env=environment(), timeout_s=60.0)
    except FrontierError:
        return []
    lines = [re.sub(r"\(.*\)$", "", line.strip()) for line in text.splitlines()]
    return [line for line in lines if re.fullmatch(r"[A-Za-z0-9][\w.+/-]*[\w+]", line)]


def is_available(module: str, existing: Sequence[str]) -> bool:
    """Return True if the module exists. A name without a version means any version."""
    return any(name == module or name.startswith(f"{module}/") for name in existing)


def images_near(image: Path) -> list[Path]:
    """Return the container images near an image that no longer exists: in its folder, or in neighbouring folders."""
    folder = image.parent
    for _ in range(_IMAGE_LEVELS):
        if folder.is_dir():
            return sorted([*folder.glob("*.sif"), *folder.glob("*/*.sif")])
        folder = folder.parent
    return []


def requeue_note() -> str:
    """Return a note if Slurm requeues no job by default. '' otherwise, and without Slurm."""
    try:
        text = slurm.call(["scontrol", "show", "config"], timeout_s=20.0)
    except FrontierError:
        return ""
    if re.search(r"^JobRequeue\s*=\s*0\b", text, re.MULTILINE) is None:
        return ""
    return (
        "JobRequeue=0: Slurm requeues only jobs with the option --requeue, which our scripts have; if the site forbids "
        "it, use --continue-with successor"
    )


def _nearest(name: str, existing: Sequence[str]) -> str:
    found = closest(name, existing)
    return f"the nearest is {found}" if found else "there is none with a similar name"
