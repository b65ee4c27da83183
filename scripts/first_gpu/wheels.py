"""Downloads Python packages that a bare machine lacks, and unpacks them on a machine without a network. For a rehearsal
it makes an environment without such packages. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata, util
from pathlib import Path

# Distribution → module that shows that it is installed. torch and Triton must be installed on the machine already. The
# last two packages are needed to compile and read kernels.
NEEDED = {
    "numpy": "numpy",
    "PyYAML": "yaml",
    "typing-extensions": "typing_extensions",
    "annotated-types": "annotated_types",
    "typing-inspection": "typing_inspection",
    "pydantic-core": "pydantic_core",
    "pydantic": "pydantic",
    "rich": "rich",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "pygments": "pygments",
    "safetensors": "safetensors",
    "setuptools": "setuptools",
    "msgpack": "msgpack",
    "pyelftools": "elftools",
}
# packages that a rehearsal's environment lacks
LACKING = ["pydantic", "pydantic-core", "annotated-types", "typing-inspection", "pyelftools"]
MOST_BYTES = 64 * 2**20
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]  # pip needs each name separately


def normal(name: str) -> str:
    """Return a distribution's name in the form that is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing() -> list[str]:
    """Return the distributions that are not installed in this Python."""
    return [name for name, module in NEEDED.items() if util.find_spec(module) is None]


def unpack(wheels: Path, names: list[str], site: Path) -> list[str]:
    """Unpack the wheels of these distributions into `site`, the first folder of PYTHONPATH. Returns the names of their
    files.
    """
    site.mkdir(parents=True, exist_ok=True)
    wanted = set(map(normal, names))
    chosen = [path for path in sorted(wheels.glob("*.whl")) if normal(path.name.split("-")[0]) in wanted]
    for path in chosen:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    return [path.name for path in chosen]


def provide(wheels: Path | None, site: Path, python: str) -> list[str]:
    """Unpack packages that `python` lacks and return the wheels used. Raises SystemExit with instructions if its
    imports still fail.

    At first only missing packages are unpacked. If the import then fails, all are unpacked. This happens if the
    installed pydantic needs another pydantic-core.
    """
    lacking = missing()
    used = []
    if lacking and wheels is not None:
        used = unpack(wheels, lacking, site)
        if imports(python, site):
            used = unpack(wheels, list(NEEDED), site)
    if fault := imports(python, site):
        raise SystemExit(
            f"error: this Python cannot import the packages that frontier_llm needs: {fault}\n"
            f"  fix: on a machine with a network: scripts/first_gpu.sh --collect-wheels DIR --python "
            f"{sys.version_info[0]}.{sys.version_info[1]}"
            ", then on this machine: scripts/first_gpu.sh --wheels DIR"
        )
    return used


def imports(python: str, site: Path) -> str:
    """Import the package's requirements in `python`. Returns the last line of the error, or ''."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {', '.join(NEEDED.values())}"
    done = subprocess.run([python, "-c", code, str(site)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def collect(folder: Path, python: str, platforms: list[str]) -> int:
    """Download the wheels for another machine's Python. The version of pydantic-core follows from pydantic."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = [word for platform in platforms or PLATFORMS for word in ("--platform", platform)]
    options = [
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *tags,
        "--dest",
        str(folder),
    ]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, *NEEDED], check=True)
    files = sorted(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} wheels, {size / 2**20:.1f} MiB, in {folder}: scripts/first_gpu.sh --wheels {folder}")
    if size > MOST_BYTES:
        print(f"error: {folder} holds more than {MOST_BYTES >> 20} MiB\n  fix: empty it first", file=sys.stderr)
    return int(size > MOST_BYTES)


def from_installed(names: list[str], folder: Path) -> None:
    """Build wheels from packages that are installed here, for a rehearsal without a network."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            python = sys.executable
            fix = "source scripts/install.sh, or set PYTHON to a python that has it"
            raise SystemExit(f"error: the rehearsal needs {name}, which {python} does not have\n  fix: {fix}") from None
        tag = (distribution.read_text("WHEEL") or "").split("Tag: ")[1].split()[0]
        path = folder / f"{normal(name).replace('-', '_')}-{distribution.version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in distribution.files or []:
                if ".." not in file.parts and file.suffix != ".pyc":
                    archive.write(file.locate(), str(file))


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
