"""Creates a bare environment for a rehearsal on this machine: this Python without packages that a GPU machine may lack.
Standard library only.
"""

from __future__ import annotations

import sysconfig
import venv
from importlib import metadata
from pathlib import Path

LACKING = ["pydantic", "pydantic-core", "annotated-types", "typing-inspection", "pyelftools"]


def bare_environment(folder: Path) -> Path:
    """Return the python of a virtual environment with links to all packages of this one except LACKING."""
    python = folder / "bin" / "python"
    venv.EnvBuilder(symlinks=True, clear=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    left_out = set()
    for name in LACKING:
        distribution = metadata.distribution(name)
        left_out |= {file.parts[0] for file in distribution.files or []}
    for library in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
        for path in Path(library).iterdir():
            # The checkout's own package is on PYTHONPATH.
            ours = path.name.startswith(("frontier_llm", "__editable__", "distutils-precedence"))
            if path.name not in left_out and not ours and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return python
