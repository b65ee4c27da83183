"""Installs the package and builds its C++ parts ahead of time, with a plain C++ compiler and the torch that is
already there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # pip does not put the checkout on the path

from frontier_llm.libraries import torch_ops_sources  # noqa: E402

OLDEST_TORCH = (2, 10)
# clang is refused: with -fopenmp its code needs LLVM's OpenMP library, and torch has loaded GCC's.
OLDEST_GCC = 12
COMPILER_MODULE = "PrgEnv-gnu/8.7.0"  # as in slurm/sites/frontier.yaml
# -ffp-contract=fast lets a * b + c become one instruction; the other two let sqrt and comparisons vectorise.
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-Wall",
]
# GCC 12 gives this warning for its own AVX-512 header.
FLAGS += ["-Wno-maybe-uninitialized"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}

# Packages that read the code objects of the GPU kernels. The Triton of the installed torch (for ROCm or CUDA) compiles
# these kernels, because another Triton would overwrite its files. To launch kernels, none of these packages is needed.
KERNEL_TOOLS = ["msgpack", "pyelftools"]
TRITON = "triton>=3.5,<4"  # for a torch for CPUs, which has no Triton of its own
TUNING = ["scipy"]  # `frontier-llm tune`: expected gains, and the fit of a machine's constants


def fail(what: str, fix: str) -> None:
    raise SystemExit(f"error: {what}\n  fix: {fix}")


def compiler_version(compiler: list[str]) -> tuple[str, int]:
    """('GCC' or 'clang', major version) as the preprocessor says, also of a wrapper; ('', 0) for another compiler."""
    command = [*compiler, "-E", "-P", "-x", "c++", "-"]
    done = subprocess.run(command, input="__clang_major__ __GNUC__\n", capture_output=True, text=True, check=False)
    words = done.stdout.split()
    if done.returncode or len(words) != 2:
        return "", 0
    clang, gcc = words
    if clang.isdigit():
        return "clang", int(clang)
    return ("GCC", int(gcc)) if gcc.isdigit() else ("", 0)


def find_compiler() -> list[str]:
    """CXX, or the first of c++ and g++ that knows C++20: on SLES 15 `c++` is GCC 7, also if a module has put a newer
    `g++` on PATH.
    """
    wanted = f"GCC {OLDEST_GCC}"
    candidates = [os.environ["CXX"].split()] if os.environ.get("CXX") else [["c++"], ["g++"]]
    found = [compiler for compiler in candidates if shutil.which(compiler[0])]
    if not found:
        fail(f"no C++ compiler: {candidates[0][0]!r} is not on PATH", f"install {wanted} or newer, or set CXX")
    refused = []
    for compiler in found:
        name, version = compiler_version(compiler)
        if name == "GCC" and version >= OLDEST_GCC:
            return compiler
        refused.append(
            f"{' '.join(compiler)} is {name} {version}" if name else f"{' '.join(compiler)} is neither GCC nor clang"
        )
    fix = (
        f"on Frontier: module load {COMPILER_MODULE}; elsewhere load or install {wanted} or newer; then set "
        f"CXX=g++ if c++ is the old one"
    )
    fail(f"the C++ parts need {wanted} or newer: {', '.join(refused)}", fix)
    raise AssertionError


def torch_flags() -> tuple[list[str], list[str], list[str]]:
    """Include folders, library folders and flags of the torch in this environment; a clear error where there is
    none. Without -fopenmp torch's header runs at::parallel_for in one thread. The linker gets no OpenMP library,
    because torch has loaded one.
    """
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        fail(
            f"the C++ ops are built against torch, which cannot be imported here: {error}",
            "install torch first (your site's build on ROCm), then: pip install --no-build-isolation .",
        )
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < OLDEST_TORCH:
        fail(f"torch {torch.__version__} is too old", f"install torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    version = f'-DFRONTIER_TORCH_VERSION="{torch.__version__}"'
    sources = f'-DFRONTIER_SOURCES="{torch_ops_sources()}"'
    return cpp_extension.include_paths(), cpp_extension.library_paths(), ["-fopenmp", abi, version, sources]


def build_state(compiler: list[str], commands: list[list[str]], files: list[Path]) -> str:
    """sha256 of everything that a library is built from: the compiler's version, the commands (they contain torch's
    version) and the contents of the files.
    """
    compiler_text = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((commands, compiler_text)).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class BuildOps(Command):
    """`python setup.py build_ops --arch gfx90a[,sm_90]`: the GPU kernels, compiled by Triton; needs no GPU."""

    description = "compile the GPU ops ahead of time (Triton; no GPU needed)"
    user_options: ClassVar = [("arch=", None, "architectures, comma-separated: gfx90a, sm_90 … (default: all)")]

    def initialize_options(self) -> None:
        self.arch = ""

    def finalize_options(self) -> None:
        self.architectures = [name.strip() for name in self.arch.split(",") if name.strip()]

    def run(self) -> None:
        self.spawn(
            [
                sys.executable,
                "-m",
                "frontier_llm.ops.aot.build",
                str(ROOT / "frontier_llm" / "_native" / "gpu"),
                *self.architectures,
            ]
        )


class NativeBuild(build_ext):
    """Plain shared libraries (no Python module) in frontier_llm/_native, each source compiled with its own flags."""

    def run(self) -> None:
        self.compiler_command = find_compiler()  # before torch is imported
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def copy_extensions_to_source(self) -> None:
        (ROOT / "frontier_llm" / "_native").mkdir(exist_ok=True)
        self.force = True  # a library of another build can be there, and be newer
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        compiler = self.compiler_command
        target = Path(self.get_ext_fullpath(ext.name))
        sources = [ROOT / source for source in ext.sources]
        includes, libraries, defines = torch_flags() if "torch" in ext.libraries else ([], [], [])
        build = Path(self.build_temp).absolute()
        build.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        system = [flag for folder in includes for flag in ("-isystem", folder)]

        objects = [str(build / f"{source.stem}.o") for source in sources]
        compile_commands = []
        for source, result in zip(sources, objects, strict=True):
            isa = INSTRUCTION_SETS.get(source.stem.removeprefix("kernels_"), [])
            compile_commands.append([*compiler, *FLAGS, *defines, *isa, *system, "-c", str(source), "-o", result])
        link = [flag for folder in libraries for flag in ("-L", folder)] + [f"-l{name}" for name in ext.libraries]
        link_command = [*compiler, "-shared", *objects, *link, *ext.extra_link_args, "-o", str(target)]
        stamp = build / f"{target.stem}.sha256"
        state = build_state(compiler, [*compile_commands, link_command], [*sources, *map(ROOT.joinpath, ext.depends)])
        if not self.force and target.exists() and stamp.exists() and stamp.read_text() == state:
            return
        stamp.unlink(missing_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.spawn, compile_commands))
        self.spawn(link_command)
        stamp.write_text(state)


def native_libraries() -> list[Extension]:
    """The shared libraries: CPU ops, sample index, shared memory, the authenticated store,
    heartbeats, GPU launcher.
    """
    x86 = os.uname().machine in ("x86_64", "AMD64")
    kernels = [f"csrc/cpu/kernels_{isa}.cpp" for isa in ("generic", *(INSTRUCTION_SETS if x86 else ()))]
    headers = [
        str(path.relative_to(ROOT)) for pattern in ("*.h", "*.inc") for path in sorted((ROOT / "csrc").rglob(pattern))
    ]
    libraries = [
        Extension(
            "frontier_llm._native.libfrontier_ops",
            sources=[
                "csrc/cpu/ops.cpp",
                "csrc/cpu/matrix_ops.cpp",
                "csrc/cpu/buffer_ops.cpp",
                "csrc/cpu/dispatch.cpp",
                *kernels,
            ],
            depends=headers,
            libraries=["torch", "torch_cpu", "c10"],
        )
    ]
    for name, source, links in (
        ("libsample_index", "csrc/sample_index.cpp", ["-pthread"]),
        ("libshm_collectives", "csrc/shm/shm_collectives.cpp", ["-lrt", "-pthread"]),
        ("libstore_server", "csrc/store_server.cpp", ["-pthread"]),
        ("libheartbeat", "csrc/heartbeat.cpp", ["-pthread"]),
        ("libgpu_launcher", "csrc/gpu_launcher.cpp", ["-ldl"]),
    ):
        libraries.append(
            Extension(f"frontier_llm._native.{name}", sources=[source], depends=headers, extra_link_args=links)
        )
    return libraries


def shared_files() -> list[tuple[str, list[str]]]:
    """configs/, slurm/, launch/ and the page of other frameworks' names as data files, so that an installed wheel finds
    them (config.load.configs_dir, cluster.sites.root_dir, config.foreign).
    """
    folders: dict[str, list[str]] = {}
    found = [path for name in ("configs", "slurm", "launch") for path in (ROOT / name).rglob("*")]
    for path in sorted([*found, ROOT / "docs" / "coming_from.md"]):
        if path.is_file():
            folders.setdefault(str(Path("share/frontier_llm") / path.parent.relative_to(ROOT)), []).append(
                str(path.relative_to(ROOT))
            )
    return sorted(folders.items())


def version() -> str:
    match = re.search(r'__version__ = "([^"]+)"', (ROOT / "frontier_llm" / "__init__.py").read_text(encoding="utf-8"))
    assert match
    return match.group(1)


if sys.platform != "linux" and any(command in sys.argv for command in ("build_ext", "install", "bdist_wheel")):
    fail(f"the C++ parts are built for Linux, not {sys.platform}", "use Linux, or a container")

setup(
    name="frontier-llm",
    version=version(),
    description="Pretraining with tensor x pipeline x ZeRO-1 data parallelism on MI250X supercomputers, and on a "
    "laptop",
    python_requires=">=3.11",
    license="Apache-2.0",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in ("3.11", "3.12", "3.13")),
    ],
    packages=find_packages(include=["frontier_llm", "frontier_llm.*"]),
    package_data={
        "frontier_llm": ["_native/*.so", "_native/gpu/*/*", "planner/best_published.json", "py.typed", "__init__.pyi"]
    },
    data_files=shared_files(),
    ext_modules=native_libraries(),
    cmdclass={"build_ext": NativeBuild, "build_ops": BuildOps},
    entry_points={
        "console_scripts": [
            "frontier-llm = frontier_llm.cli.main:entry",
            "frontier-lm-eval = frontier_llm.cli.lm_eval:main",
        ],
        "lm_eval.models": ["frontier-llm = frontier_llm.inference.lm_eval_model:FrontierLM"],
    },
    # torch is not listed, because pip must never replace the build that a site has for its GPUs. The build checks
    # torch's version.
    install_requires=["numpy", "pyyaml", "pydantic>=2", "rich", "safetensors", "sentencepiece", "tokenizers"],
    extras_require={
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "import-linter",
            "types-PyYAML",
            "zstandard",
            *TUNING,  # scipy: also benchmarks/planner/fit_machines.py
            "matplotlib",  # draws the figures of docs/
            "nbclient",  # executes docs/notebook.ipynb
            "ipykernel",
            "megatron-core==0.16.1",
            "mpi4py",
            "moto[server]",  # a local S3 server
            "s3fs",
            TRITON,  # compiles and interprets the GPU kernels
            *KERNEL_TOOLS,
        ],
        "kernels": KERNEL_TOOLS,
        # datasets installs fsspec, aiohttp and huggingface_hub; s3:// and gs:// also need s3fs or gcsfs
        "data": ["pyarrow", "datasets"],
        "remote": ["s3fs"],  # checkpoints in an S3 store; s3fs installs fsspec. gs:// needs gcsfs, az:// needs adlfs
        # a source package that is built with the installed torch: use --no-build-isolation
        "deepspeed": ["deepspeed==0.19.8"],
        "hf": ["transformers"],
        # lm_eval's own model class, used for comparisons, needs the last two
        "eval": ["lm_eval", "transformers", "accelerate"],
        "plot": ["plotly", "tensorboard"],
        "trackers": ["wandb", "mlflow-skinny", "sqlalchemy", "alembic"],  # mlflow's local file needs the last two
        "tune": [*TUNING, "plotly"],
        "docs": ["mkdocs", "mkdocs-jupyter"],
    },
)
