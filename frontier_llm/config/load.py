"""Reads YAML with `base:` and `key=value` overrides into one frozen RunConfig. One ConfigError reports all violations.

`base:` may stand at the root (another run file) and in `model:` (a model file). A plain string `model: gpt-22b` means
`model: {base: gpt-22b}`. Nested mappings are merged key by key. A file takes precedence over its base, and command-line
overrides take precedence over all files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frontier_llm import log
from frontier_llm.config.durations import is_duration, without_durations
from frontier_llm.config.foreign import unknown_key_fix
from frontier_llm.config.model import ModelConfig
from frontier_llm.config.places import configs_dir
from frontier_llm.config.plugins import import_plugins, plugin_paths
from frontier_llm.config.schema import RunConfig
from frontier_llm.config.urls import without_secrets
from frontier_llm.errors import ConfigError, Problem, closest, suggest, unreadable

T = TypeVar("T", bound=BaseModel)

# Size limit of a YAML file or value in bytes. A file of this size takes a second or two to parse. The largest shipped
# file has 10 KB.
MAXIMUM_BYTES = 1 << 17
_ENDINGS = (".yaml", ".yml")
# Largest number of values in a YAML file after its aliases are expanded. Shipped files have fewer than 1,000.
MAXIMUM_NODES = 100_000

# Former name → current name, by kind of file.
RENAMED: dict[str, dict[str, str]] = {"machines": {"eos": "h100", "selene": "a100"}}


def available(kind: str) -> list[str]:
    """Names of the shipped files of a kind: 'models', 'runs' or 'machines'."""
    return sorted(path.stem for path in (configs_dir() / kind).glob("*.yaml"))


def about_file(path: Path) -> str:
    """Return the first sentence of the comment at the top of a YAML file. '' if there is no comment."""
    with path.open(encoding="utf-8") as lines:
        comment = " ".join(line.strip("# \n") for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"\. (?=[A-Z])", comment)[0].rstrip(".")


@cache
def _new_name(name: str, kind: str) -> str:
    """Return the name that replaces a former one. Logs a notice once per process."""
    new = RENAMED[kind][name]
    log.info(f"{kind[:-1]} {name!r} has the new name {new!r}: write {new} instead of {name}")
    return new


def find_file(name: str, kind: str, relative_to: Path | None = None) -> Path:
    """Resolve a shipped name ('gpt-22b') or a path. A path is relative to the file that mentions it, then to the
    working directory.

    Raises ConfigError with the closest shipped name.
    """
    candidates = [Path(name)] if relative_to is None else [relative_to / name, Path(name)]
    for path in candidates:
        # os.path.isfile, because Path.is_file() raises for a name that is too long
        if path.suffix in _ENDINGS and os.path.isfile(path):
            return path
    shipped = available(kind)
    if name in RENAMED.get(kind, {}):
        name = _new_name(name, kind)
    if name in shipped:
        return configs_dir() / kind / f"{name}.yaml"
    fix = suggest(name, shipped) + "; or the path of a .yaml file"
    stem = name.removesuffix(".yml")
    if os.path.isfile(f"{stem}.yaml"):
        fix = f"did you mean {stem}.yaml?"
    elif os.path.isfile(name):
        fix = f"{name} exists, but the name of a {kind[:-1]} file must end in .yaml: rename it"
    elif kind == "runs" and name in available("models"):
        fix = (
            f"{name} is a model, not a run: use a run that trains it, or write a run file with `model: {name}`; runs: "
            f"{', '.join(shipped)}"
        )
    what = f"no {kind[:-1]} file {name!r}"
    if name.endswith(_ENDINGS):
        what = f"no {kind[:-1]} file {' or '.join(dict.fromkeys(os.path.abspath(path) for path in candidates))}"
        if stem == name or not os.path.isfile(f"{stem}.yaml"):
            fix = f"check the path, or give one of {', '.join(shipped)}"
    raise ConfigError(what, fix=fix)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file as a mapping. Raises ConfigError with file, line and column if it cannot be parsed."""
    try:
        with path.open("rb") as file:
            text = file.read(MAXIMUM_BYTES + 1)
        _check_length(len(text))
        content = _parse(text.decode())
    except ConfigError as error:
        raise ConfigError([replace(problem, where=str(path)) for problem in error.problems]) from None
    # ValueError: not UTF-8, or an invalid date.
    except (yaml.YAMLError, ValueError, RecursionError, OSError) as error:
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        reason = str(error).replace('in "<unicode string>", ', "")
        raise ConfigError(
            f"cannot read: {reason}",
            where=os.path.abspath(path),
            fix="check that the file is UTF-8 YAML",
        ) from error
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"contains a {type(content).__name__}"
        raise ConfigError(f"{found}, but a mapping is expected", where=str(path), fix="write `key: value` lines")
    return content


def _check_length(size_bytes: int) -> None:
    """Raise ConfigError if a text to parse is longer than MAXIMUM_BYTES."""
    if size_bytes > MAXIMUM_BYTES:
        raise ConfigError(f"has more than {MAXIMUM_BYTES:,} bytes", "check that this is the correct file")


def _parse(text: str) -> Any:
    """Parse a YAML value. Raises ConfigError for a duplicate key, and for aliases that expand to more than
    MAXIMUM_NODES values.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _unfolded(node, {}) > MAXIMUM_NODES:
            raise ConfigError(
                f"has more than {MAXIMUM_NODES} values after its YAML aliases are expanded",
                "write fewer values, or remove the aliases",
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _unfolded(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node, with aliases expanded. Raises ConfigError for a duplicate key in a
    mapping.
    """
    if node not in sizes:
        sizes[node] = MAXIMUM_NODES + 1  # value for a node that contains itself
        children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
            first: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    lines = f"lines {first[key.tag, key.value]} and {line}"
                    raise ConfigError(f"{key.value!r} is written twice, in {lines}", "remove one of them")
                first[key.tag, key.value] = line
        sizes[node] = 1 + sum(_unfolded(child, sizes) for child in children)
    return sizes[node]


class _Whole(dict[str, Any]):
    """Mapping that `merge` does not merge: the complete mapping replaces the base's value. Otherwise a named model
    would keep keys of the model that it replaces.
    """


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into a copy of `base`. Mappings are merged key by key, other values are replaced."""
    merged = dict(base)
    for key, value in over.items():
        both_map = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and not isinstance(value, _Whole)
        merged[key] = merge(merged[key], value) if both_map else value
    return merged


def compose(path: Path, kind: str) -> tuple[dict[str, Any], list[Path]]:
    """Return a file's content merged with its `base:` files, and all these files, nearest first. Raises ConfigError for
    a circular `base:`.
    """
    files = [path.resolve()]
    return _on_its_bases(_expanded(path), kind, path.parent, files), files


def _expanded(path: Path) -> dict[str, Any]:
    """Return a file's content with the model, machine and plugins that it names by relative paths resolved."""
    content = plugin_paths(read_yaml(path), path.parent, str(path))
    return _expand_model(with_machine_path(content, path.parent), path.parent)


def with_machine_path(content: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the content of a run or site file with the path of its machine file made absolute.

    A relative path counts from `directory`, the folder of the file that names it. A path that exists only relative to
    the working directory, as in earlier versions, is accepted with a notice.
    """
    name = content.get("machine")
    if not isinstance(name, str) or not name.endswith(_ENDINGS):
        return content
    path = (directory / name).resolve()
    elsewhere = Path(name).resolve()
    if not os.path.isfile(path) and os.path.isfile(elsewhere):
        log.info(f"machine: {name} is not in {directory.resolve()}; the file in the working directory is used")
        path = elsewhere
    return {**content, "machine": str(path)}


def _on_its_bases(content: dict[str, Any], kind: str, directory: Path | None, files: list[Path]) -> dict[str, Any]:
    if "base" not in content:
        return content
    path = find_file(str(content["base"]), kind, directory).resolve()
    files.append(path)
    if path in files[:-1]:
        raise ConfigError(
            f"`base:` is circular: {' -> '.join(map(str, files))}",
            fix="remove one of these `base:` lines",
        )
    below = _on_its_bases(_expanded(path), kind, path.parent, files)
    return merge(below, {key: value for key, value in content.items() if key != "base"})


def _expand_model(content: dict[str, Any], directory: Path | None) -> dict[str, Any]:
    """Resolve `model: NAME` and `model: {base: NAME, …}` relative to the folder of the file that contains them."""
    model = content.get("model")
    if isinstance(model, str):
        model = {"base": model}
    if isinstance(model, dict) and "base" in model:
        return {**content, "model": _Whole(_on_its_bases(model, "models", directory, []))}
    return content


ONE_OF_TWO = "remove one of the two arguments"


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Convert ['train.steps=5', 'data.train=null'] to a nested mapping. Values are YAML.

    Raises ConfigError for a word without '='.
    """
    nested: dict[str, Any] = {}
    problems = []
    typed: list[str] = []
    words = iter(overrides)
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key or any(not part for part in key.split(".")):
            setting, _, following = word.partition(":")  # train.steps:100
            if "." in word and not separator and not following:
                following = next(words, "")
            if following == "=":  # train.steps = 100
                following = next(words, "")
            is_pair = "." in setting and following and "=" not in following
            fix = f"write {setting}={following}" if is_pair else "write e.g. train.steps=100"
            problems.append(Problem(where=word, what="is not of the form key=value", fix=fix))
            continue
        _check_length(len(os.fsencode(text)))
        try:
            value = _parse(text)
        # ValueError: an invalid date, or a number of thousands of digits.
        except (yaml.YAMLError, ValueError, RecursionError):
            value = text
        *parents, leaf = key.split(".")
        target = nested
        for parent in parents:
            if isinstance(target.get(parent), str):  # for example model=NAME followed by model.layers=2
                target[parent] = {"base": target[parent]}
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                what = f"sets a key of {parent!r}, which another argument sets to a value without keys"
                problems.append(Problem(where=word, what=what, fix=ONE_OF_TWO))
                target = {}
        earlier = target.get(leaf)
        if isinstance(earlier, dict) and value is not None and any(other.startswith(f"{key}.") for other in typed):
            if isinstance(value, str):  # for example model.layers=2 followed by model=NAME
                value = {"base": value}
            if isinstance(value, dict):
                value = merge(earlier, value)
            else:
                what = f"sets {key!r} to a value without keys, and another argument sets a key of it"
                problems.append(Problem(where=word, what=what, fix=ONE_OF_TWO))
                value = earlier
        target[leaf] = value
        typed.append(key)
    if problems:
        raise ConfigError(problems)
    return nested


# Texts for pydantic's kinds of errors.
_RULES = {
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
    "tuple_type": "must be a list",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "too_short": "must have at least {min_length} entries",
}


def as_problem(model_type: type[BaseModel], error: ErrorDetails) -> Problem:
    """Convert an error of pydantic to a problem with the keys of a run file."""
    # For a union, pydantic adds the type's name to the location. The user did not write that name.
    where = ".".join(str(part) for part in error["loc"] if not re.match(r"(tuple|literal|list|dict)?\[", str(part)))
    if error["type"] == "extra_forbidden":
        return Problem(where=where, what="unknown key", fix=unknown_key_fix(model_type, error["loc"]))
    if error["type"] == "missing" and isinstance(error["loc"][-1], int):
        return Problem(
            where=where.rpartition(".")[0],
            what=f"must have at least {error['loc'][-1] + 1} entries; got {list(error['input'])}",
            fix="",
        )
    if error["type"] == "missing":
        return Problem(
            where=where,
            what="is required",
            fix=f"add `{error['loc'][-1]}:`" + (" or `model: NAME`" if error["loc"][0] == "model" else ""),
        )
    limits = {key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()}
    # Do not use this text as a format string: it can contain braces of the user's text.
    said = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    rule = _RULES[error["type"]].format(**limits) if error["type"] in _RULES else said
    near = closest(error["input"], re.findall(r"'([^']*)'", rule)) if isinstance(error["input"], str) else ""
    value = without_secrets(repr(error["input"]))
    fix = f"did you mean {near!r}?" if near else ""
    if error["type"] == "int_parsing" and is_duration(where):
        fix = "write a number of steps, or a number with its unit: steps, tokens or epochs, e.g. 20B tokens"
    return Problem(
        where=where,
        what=f"{rule}; got {value if len(value) < 80 else value[:77] + '...'}",
        fix=fix,
    )


def _joined(problems: list[Problem]) -> list[Problem]:
    """Merge the problems of each place into one. If all alternatives of a union failed, their rules are joined with
    "or". If a problem lies deeper inside the place, only the deeper problem is kept.
    """
    by_place: dict[str, Problem] = {}
    for problem in problems:
        if any(other.where.startswith(f"{problem.where}.") for other in problems):
            continue
        other = by_place.get(problem.where)
        if other is not None and "; got " in problem.what:
            problem = replace(
                other,
                what=f"{other.what.partition('; got ')[0]}, or {problem.what.removeprefix('must be ')}",
            )
        by_place[problem.where] = problem
    return list(by_place.values())


def build(model_type: type[T], content: Mapping[str, Any], where: str = "") -> T:
    """Validate a mapping against a schema class. Raises ConfigError with all violations."""
    try:
        return model_type.model_validate(content)
    except ValidationError as error:
        problems = _joined([as_problem(model_type, detail) for detail in without_durations(error.errors())])
        raise ConfigError(
            [Problem(where=f"{where}: {p.where}" if where else p.where, what=p.what, fix=p.fix) for p in problems]
        ) from None


def load_run(name_or_path: str, overrides: Iterable[str] = (), source: str = "command line") -> RunConfig:
    """Read a run file with its bases and the overrides, and import its plugins. Errors name `source` for an override.

    Raises ConfigError listing every unknown key (with the closest valid one), missing key and wrong value.
    """
    path = find_file(name_or_path, "runs")
    overrides = list(overrides)
    content, _ = compose(path, "runs")
    typed_content = with_machine_path(_expand_model(parse_overrides(overrides), None), Path.cwd())
    over = plugin_paths(typed_content, Path.cwd(), source)
    merged = merge(content, over)
    try:
        config = build(RunConfig, merged)
    except ConfigError as error:
        typed = [word.partition("=")[0] for word in overrides]
        raise ConfigError(
            [replace(p, where=f"{source if _within(p.where, typed) else path}: {p.where}") for p in error.problems]
        ) from None
    if "validated" in (merged.get("optimizer") or {}):
        log.info("optimizer.validated has no effect any more: remove the key (the losses stay the same)")
    import_plugins(config.plugins)
    return config


def own_run_file(run_dir: Path) -> Path | None:
    """Return the run file in a run directory: config.yaml if the run was started, otherwise run.yaml.

    The caller may import the plugins that the file names. Returns None if there is no run file or if it belongs to
    another user.
    """
    for name in ("config.yaml", "run.yaml"):
        path = run_dir / name
        if path.is_file():
            return path if path.stat().st_uid == os.geteuid() else None
    return None


def own_plugins(run_dir: Path) -> tuple[str, ...]:
    """Return the plugins in the run file of a run directory. Returns none if the file does not belong to this user."""
    path = own_run_file(run_dir)
    names = compose(path, "runs")[0].get("plugins", ()) if path is not None else ()
    if isinstance(names, list | tuple):
        return tuple(name for name in names if isinstance(name, str))
    return ()


def _within(key: str, others: Iterable[str]) -> bool:
    """Return True if one of the keys equals this key, is a section around it, or lies inside it."""
    return any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in others)


def load_model(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a model file by shipped name or path. `name` defaults to the file's stem."""
    path = find_file(name_or_path, "models")
    content, _ = compose(path, "models")
    return build(ModelConfig, merge({"name": path.stem, **content}, overrides or {}), where=str(path))


def dump(config: BaseModel) -> str:
    """Return YAML that loads back to an equal config. A run directory stores it as config.yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
