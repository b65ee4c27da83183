"""The package uses no name that torch 2.10 lacks. The target machines have 2.10, and CI installs only a newer torch."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).resolve().parents[2] / "frontier_llm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# written by scripts/torch_names.py
LISTED = json.loads((Path(__file__).parent / "torch_2_10_names.json").read_text(encoding="utf-8"))
MODULES = {name: set(words.split()) for name, words in LISTED["modules"].items()}
CLASSES = {name: set(words.split()) for name, words in LISTED["classes"].items()}
OPERATORS = set(LISTED["operators"].split())
NAMESPACES = {name.partition("::")[0] for name in OPERATORS}


def imported(tree: ast.AST) -> dict[str, str]:
    """Map each name in a file to the dotted name in torch that it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.AST) -> list[str] | None:
    """Return ['torch', 'cuda', 'Event'] for torch.cuda.Event, or None if the chain does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (begin := dotted(node.value)):
        return [*begin, node.attr]
    return None


def used_names(source: str) -> set[str]:
    """Return every dotted name of torch in a file: imported names, and the longest chains of attributes on them."""
    tree = ast.parse(source)
    names = imported(tree)
    nodes = list(ast.walk(tree))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)} | shadowed(tree, names)
    chains = [dotted(node) for node in nodes if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner]
    used = {".".join([names[chain[0]], *chain[1:]]) for chain in chains if chain and chain[0] in names}
    modules = {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("torch.")
    }
    return used | set(names.values()) | modules


def shadowed(tree: ast.AST, names: dict[str, str]) -> set[int]:
    """Return the ids of chains in functions that assign another value to the chain's first name."""
    found = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            nodes = list(ast.walk(function))
            assigned = {
                node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            } & names.keys()
            chains = [(node, dotted(node)) for node in nodes if isinstance(node, ast.Attribute | ast.Name)]
            found |= {id(node) for node, chain in chains if chain and chain[0] in assigned}
    return found


def used_attributes(source: str) -> set[str]:
    """Return every attribute in a file. This finds methods of tensors and of other objects whose class the source does
    not show.
    """
    return {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}


def missing_part(name: str) -> str | None:
    """Return the first part of a dotted name that torch 2.10 lacks, or None. Attributes of instances are not
    followed.
    """
    parts = name.split(".")
    if parts[:2] == ["torch", "ops"]:
        is_foreign = len(parts) < 4 or parts[2] not in NAMESPACES  # operators that this package registers
        return None if is_foreign or "::".join(parts[2:4]) in OPERATORS else ".".join(parts[:4])
    place = "torch"
    for part in parts[1:]:
        known = MODULES.get(place) or CLASSES.get(place)
        if known is None:  # a function, a constant, or a class that the list has under its defining module
            return None
        if f"{place}.{part}" not in MODULES and part not in known:
            return f"{place}.{part}"
        place = f"{place}.{part}"
    return None


def new_members() -> dict[str, str]:
    """Map attribute to class, for members of the installed torch that no class or module of 2.10 has."""
    old = set().union(*MODULES.values(), *CLASSES.values())
    found: dict[str, str] = {}
    for name in sorted(CLASSES, key=len, reverse=True):  # base classes come last: their names are shorter
        module, _, attribute = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):  # a nested class, or one that the installed torch no longer has
            continue
        found |= {member: name for member in dir(value) if not member.startswith("_") and member not in old}
    return found


def own_names() -> set[str]:
    """Return the attributes that the package's own classes and functions define."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return defined | assigned | fields


def missing_names(source: str) -> Iterator[str]:
    for name in sorted(used_names(source)):
        if part := missing_part(name):
            yield part


def test_the_list_is_that_of_torch_2_10() -> None:
    assert LISTED["torch"] == "2.10.0"
    assert {"addmm", "compile", "Tensor"} <= MODULES["torch"] and "addmm_" in CLASSES["torch.Tensor"]
    assert {"aten::addmm", "c10d::allreduce_"} <= OPERATORS
    assert "scaled_dot_product_attention" in MODULES["torch.nn.functional"]


def test_every_name_of_torch_is_in_2_10() -> None:
    missing = {
        path.relative_to(PACKAGE).as_posix(): list(missing_names(text))
        for path in SOURCES
        if "torch" in (text := path.read_text(encoding="utf-8"))
    }
    assert {path: names for path, names in missing.items() if names} == {}


def test_no_method_is_newer_than_2_10() -> None:
    """The check uses names alone. It does not find a new method whose name another class of torch 2.10 or of the
    package has too.
    """
    new = new_members()
    used = {name for path in SOURCES for name in used_attributes(path.read_text(encoding="utf-8"))}
    assert {name: new[name] for name in used & new.keys() - own_names()} == {}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import torch\ntorch.brand_new(1)", "torch.brand_new"),
        ("import torch.nn.functional as F\nF.brand_new(1)", "torch.nn.functional.brand_new"),
        ("from torch.distributed import brand_new", "torch.distributed.brand_new"),
        ("def f():\n    import torch.distributed as dist\n    dist.brand_new.x", "torch.distributed.brand_new"),
        ("from torch.brand_new import x", "torch.brand_new"),
        ("import torch.brand_new", "torch.brand_new"),
        ("from torch import Tensor\nTensor.brand_new", "torch.Tensor.brand_new"),
        ("import torch\ntorch.ops.aten.brand_new.default(1)", "torch.ops.aten.brand_new"),
    ],
)
def test_a_name_that_2_10_lacks_is_found(source: str, missing: str) -> None:
    assert list(missing_names(source)) == [missing]


def test_a_method_that_2_10_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "brand_new_", lambda self: self, raising=False)
    assert new_members()["brand_new_"] == "torch.Tensor"
    assert "brand_new_" in used_attributes("def f(x):\n    return x.view(-1).brand_new_()")
