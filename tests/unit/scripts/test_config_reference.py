"""docs/generated/configuration.md is the output of scripts/config_reference.py, and each field of config/schema.py has
a meaning.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from frontier_llm.config import schema

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", ROOT / "scripts" / "config_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(reference: ModuleType) -> None:
    assert (ROOT / "docs" / "generated" / "configuration.md").read_text(encoding="utf-8") == reference.page()


def test_a_type_without_words_is_an_error(reference: ModuleType) -> None:
    assert reference.type_text("StepRange") == "a step, or FIRST-LAST"
    with pytest.raises(ValueError, match=r"Annotated\[str, BeforeValidator\(str\)\] has no description"):
        reference.type_text("Annotated[str, BeforeValidator(str)]")


def test_a_field_without_a_comment_is_an_error(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(schema.__file__).read_text(encoding="utf-8")
    line = next(line for line in source.splitlines() if line.startswith("    clip_norm: "))
    read = reference.inspect.getsource
    bare = source.replace(line, line.partition("  #")[0])
    monkeypatch.setattr(reference.inspect, "getsource", lambda module: bare if module is schema else read(module))
    with pytest.raises(ValueError, match=r"OptimizerConfig.clip_norm has no comment"):
        reference.page()
