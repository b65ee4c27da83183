"""Checks rules that all code of this project must follow, such as limits on the size of files and functions."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness.tokens import count_tokens

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "frontier_llm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TORCH_FREE = (
    "config",
    "run",
    "schedule",
    "blueprint",
    "machine",
    "topology",
    "data",
    "planner",
    "cluster",
    "experiments/scaling",
    "experiments/tuning",
    "certificate",
)
WITH_TORCH = ("certificate/axis_types", "certificate/device_step")


@pytest.fixture(scope="module")
def trees():
    """Parse each source file once, for the rules of this file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def place(path, node=None):
    """Return the path of a file relative to the package, followed by the line of `node` if there is one."""
    name = path.relative_to(PACKAGE).as_posix()
    return name if node is None else f"{name}:{node.lineno}"


def run(*command, **options):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=False, **options)


def test_no_import_runs_backwards():
    done = run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_free_rooms_import_with_torch_blocked():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if str(path.relative_to(PACKAGE)).startswith(tuple(f"{name}/" for name in TORCH_FREE))
        and not str(path.relative_to(PACKAGE)).startswith(WITH_TORCH)
    ]
    program = (
        f"import sys; sys.modules['torch'] = None\nimport importlib\nfor name in {modules!r}: "
        f"importlib.import_module(name)"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr


def test_every_command_explains_itself():
    from frontier_llm.cli.main import COMMANDS

    for name in COMMANDS:
        done = run("-m", "frontier_llm.cli.main", name, "--help")
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "usage: frontier-llm" in done.stdout


MOST_LINES = 450
MOST_TOKENS_OF_A_FUNCTION = 900
# longer functions, whose limits may only be lowered
LONGER_FUNCTIONS = {
    "attention_forward": 1_220,
    "attention_grad_kv": 1_110,
    "cases": 1_080,
    "expert_work": 1_100,
    "stage_memory": 940,
}


def test_files_are_short():
    lines = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_functions_fit_on_one_screen(trees):
    too_long = {}
    for path, tree in trees.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in functions(tree):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            tokens = count_tokens(source)
            if tokens > LONGER_FUNCTIONS.get(node.name, MOST_TOKENS_OF_A_FUNCTION):
                too_long[place(path, node)] = f"{node.name} has {tokens} tokens"
    assert too_long == {}


FORBIDDEN_CALLS = {
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
    "eval",
    "exec",
}
# functions and methods of torch.distributed that unpickle what they receive, by any prefix
FORBIDDEN_NAMES = {"broadcast_object_list", "all_gather_object"}


def test_nothing_received_is_executed(trees):
    forbidden = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_NAMES:
                    forbidden[place(path, node)] = name
                if any(keyword.arg == "shell" for keyword in node.keywords):
                    forbidden[place(path, node)] = f"{name}(shell=)"
    assert forbidden == {}


# The only module that may use pickle: it reads torch.save files of other programs, and accepts only names from tables
# of harmless objects.
UNPICKLER = "interop/megatron/archive.py"
PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def test_one_file_knows_pickle_and_it_imports_no_name(trees):
    users = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if PICKLING & {name.partition(".")[0] for name in names}:
                users.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(node)
    assert set(users) == {UNPICKLER}
    tree = ast.parse((PACKAGE / UNPICKLER).read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    assert {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"} == {
        "Unpickler",
        "UnpicklingError",
    }
    (unpickler,) = [
        node for node in nodes if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    methods = {node.name: ast.unparse(node) for node in unpickler.body if isinstance(node, ast.FunctionDef)}
    assert {"find_class", "persistent_load"} <= set(methods)
    assert "super()" not in methods["find_class"]  # the inherited method would import the named module
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    assert not called & {"getattr", "__import__", "importlib.import_module", "eval", "exec"}


def test_only_the_rank_environment_reads_environ():
    """All other modules call run/rank_env.py. The exception ops/aot/build.py is a build tool."""
    texts = {place(path): path.read_text(encoding="utf-8") for path in SOURCES}
    readers = {path for path, text in texts.items() if "os.environ" in text or "os.getenv" in text}
    assert readers <= {"run/rank_env.py", "machine/env.py", "ops/aot/build.py"}


def test_groups_have_one_caller():
    callers = [
        path.relative_to(PACKAGE).as_posix() for path in SOURCES if "new_group(" in path.read_text(encoding="utf-8")
    ]
    assert set(callers) <= {"comm/groups.py"}


def test_no_function_takes_more_than_seven_positional_arguments(trees):
    """A function with more arguments makes them keyword-only, or takes a record."""
    counts = {
        place(path, node): len(node.args.posonlyargs) + len(node.args.args)
        for path, tree in trees.items()
        if "triton" not in path.parts
        for node in functions(tree)
    }
    assert {function: count for function, count in counts.items() if count > 7} == {}


def test_no_two_public_classes_share_a_name(trees):
    places = {}
    for path, tree in trees.items():
        for node in tree.body:
            is_public_interface = path.parent.name == "api"  # `Plan` and `Result` are the objects that users hold
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not is_public_interface:
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


# JSON that is hashed, or sent between the package's own processes, has its own format rules
OWN_JSON = (
    "units.py",
    "checkpoint/manifest.py",
    "checkpoint/shard.py",
    "checkpoint/directory.py",
    "checkpoint/weights.py",
    "data/tokenize.py",
)
WIRE_JSON = (
    "comm/heartbeat_store.py",
    "comm/heartbeat.py",
    "comm/store_launch.py",
    "comm/store_process.py",
    "comm/composed.py",
    "cluster/probe.py",
)


def test_json_for_readers_is_written_by_one_function() -> None:
    """The function is `units.strict_json`. It writes no NaN, because other languages could not read the file."""
    writers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "json.dump" in path.read_text(encoding="utf-8")
    }
    assert writers - {*OWN_JSON, *WIRE_JSON} == set()


def test_files_for_readers_are_written_whole_or_not_at_all() -> None:
    """`files.py` writes all files for readers. On a full disk its error names the file, and no part of the file
    remains. The exceptions are build outputs and an empty probe.
    """
    writers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if ".write_text(" in path.read_text(encoding="utf-8")
    }
    assert writers == {"cluster/disk.py", "cluster/sbatch.py", "ops/aot/build.py"}


SIMULATOR = ROOT / "tests" / "cdna2"
SIMULATOR_MAY_IMPORT = {"numpy", "elftools", "msgpack"} | sys.stdlib_module_names
ADAPTER_MAY_IMPORT = SIMULATOR_MAY_IMPORT | {"torch", "frontier_llm"}


@pytest.mark.parametrize("path", sorted(SIMULATOR.glob("*.py")), ids=lambda path: path.name)
def test_the_simulator_of_gfx90a_can_be_copied(path):
    """The core imports its own files, relatively, and three libraries. Only `driver.py` imports this project."""
    allowed = ADAPTER_MAY_IMPORT if path.name == "driver.py" else SIMULATOR_MAY_IMPORT
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"line {node.lineno} leaves the folder"
            assert node.module != "driver", f"line {node.lineno}: the core imports its adapter"
            names = []
        else:
            continue
        strange = {name.partition(".")[0] for name in names} - allowed
        assert not strange, f"line {node.lineno} imports {strange}"
