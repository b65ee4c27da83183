"""Writes the names of the torch in this environment to a JSON file. A test compares the names that the package uses
with it.

    python scripts/torch_names.py tests/arch/torch_2_10_names.json

The file is made once for each supported torch that CI does not run. It contains modules with their names, classes with
their members (both as one string of words, to keep the file short) and the operators of torch.ops. A torch for CUDA and
one for ROCm have the same names.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import torch

# Modules that a training run does not use: compilers, exporters and torch's own tests. Some of them cannot be imported
# everywhere.
LEFT_OUT = (
    "torch.ao",
    "torch.contrib",
    "torch.csrc",
    "torch.distributed.elastic",
    "torch.export",
    "torch.fx",
    "torch.jit",
    "torch.onnx",
    "torch.package",
    "torch.quantization",
    "torch.testing",
    "torch.utils.benchmark",
    "torch.utils.bottleneck",
    "torch.utils.model_dump",
    "torch.utils.viz",
)
PRIVATE = ("torch._C", "torch._C._distributed_c10d")  # private modules that this project uses
NAMESPACES = ("aten::", "c10d::", "_c10d_functional::")
# Classes whose members are listed, because a training run holds their objects.
WITH_MEMBERS = (
    "torch.Tensor",
    "torch.Generator",
    "torch._C._distributed_c10d",
    "torch.autograd.Function",
    "torch.autograd.graph",
    "torch.cuda.Event",
    "torch.cuda.Stream",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.Module",
    "torch.nn.Parameter",
    "torch.optim.Optimizer",
    "torch.profiler.profile",
)


def modules() -> dict[str, ModuleType]:
    """Return every module of torch that can be imported here, by name."""
    found: dict[str, ModuleType] = {"torch": torch}
    for path in pkgutil.walk_packages(torch.__path__, "torch.", onerror=lambda name: None):
        if path.name.startswith(LEFT_OUT) or "._" in path.name:
            continue
        try:
            found[path.name] = importlib.import_module(path.name)
        except Exception as error:  # a module of another platform may raise anything
            print(f"left out: {path.name}: {type(error).__name__}", file=sys.stderr)
    found |= {name: importlib.import_module(name) for name in PRIVATE}
    return found


def is_of_torch(value: object) -> bool:
    """Return whether a module's attribute is torch's own, and not a Python object that the module has imported."""
    if inspect.ismodule(value):
        return value.__name__.startswith("torch")
    defined_in = getattr(value, "__module__", None)
    return not isinstance(defined_in, str) or defined_in.startswith(("torch", "builtins"))


def names() -> dict[str, object]:
    """Return the content of the file."""
    found = modules()
    classes: dict[str, type] = {}
    words = {}
    for name, module in sorted(found.items()):
        inner = getattr(module, "m", module)  # torch.backends.cudnn and similar modules are objects around their module
        attributes = {key: getattr(module, key, None) for key in {*dir(module), *dir(inner)}}
        words[name] = " ".join(sorted(key for key, value in attributes.items() if is_of_torch(value)))
        classes |= {
            f"{name}.{key}": value
            for key, value in attributes.items()
            if inspect.isclass(value) and not key.startswith("_")
        }
    members = {
        name: " ".join(key for key in dir(value) if not key.startswith("_"))
        for name, value in sorted(classes.items())
        if name.startswith(WITH_MEMBERS)
        and value.__module__.startswith("torch")
        and not issubclass(value, BaseException)
    }
    overloads = torch._C._dispatch_get_all_op_names()
    operators = sorted({name.partition(".")[0] for name in overloads if name.startswith(NAMESPACES)})
    return {
        "torch": torch.__version__.split("+")[0],
        "modules": words,
        "classes": members,
        "operators": " ".join(operators),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(names(), indent=0) + "\n", encoding="utf-8")
