"""Read files of torch.save without torch.load. The content is the same, and no code in the files is executed."""

from __future__ import annotations

import argparse
import enum
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frontier_llm.errors import CheckpointError
from frontier_llm.interop.megatron.archive import Namespace, Opaque, StoredTensor, TorchArchive


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.arange(60).reshape(3, 4, 5).to(dtype)
    saved = {
        "whole": base,
        "view": base[1:, ::2],
        "turned": base.permute(2, 0, 1),
        "scalar": base[0, 0, 1],
        "empty": base[:0],
    }
    torch.save(saved, tmp_path / "x.pt")
    content = TorchArchive(tmp_path / "x.pt").content
    assert content.keys() == saved.keys()
    for name, tensor in saved.items():
        assert isinstance(content[name], StoredTensor)
        read = content[name].read()
        assert read.dtype == dtype and torch.equal(read, tensor), name


def test_plain_things_come_back(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    plain = {
        "a": 1,
        "b": [None, True, 2.5, "é", b"\x00\xff"],
        "c": OrderedDict(x=(1, 2)),
        "d": {3},
        "size": torch.ones(2, 3).shape,
    }
    torch.save({**plain, "args": argparse.Namespace(lr=1e-4, dtype=torch.bfloat16), "p": parameter}, tmp_path / "x.pt")
    content = TorchArchive(tmp_path / "x.pt").content
    assert {key: content[key] for key in plain} == plain
    assert isinstance(content["args"], Namespace) and vars(content["args"]) == {"lr": 1e-4, "dtype": "bfloat16"}
    assert torch.equal(content["p"].read(), parameter)


def test_records_of_known_packages_are_kept_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("megatron.enums")
    kind = enum.Enum("PositionEmbeddingType", {"alibi": 3}, module="megatron.enums")
    module.PositionEmbeddingType = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    state = np.random.default_rng(0).bit_generator.state["state"]
    # the two forms in which Python versions write kind.alibi
    kinds = {"by value": Attack(kind, 3), "by name": Attack(getattr, kind, "alibi")}
    torch.save({"kind": kind.alibi, **kinds, "rng": np.arange(5), "state": state}, tmp_path / "x.pt")
    monkeypatch.delitem(sys.modules, "megatron.enums")
    content = TorchArchive(tmp_path / "x.pt").content
    assert isinstance(content["kind"], Opaque) and content["kind"].arguments in [(3,), ("alibi",)]
    assert [content[key].arguments for key in kinds] == [(3,), ("alibi",)]
    assert isinstance(content["rng"], Opaque) and "megatron.enums" not in sys.modules
    assert content["state"] == state


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {marker}",), "posix.system"),
        (eval, ("open('{marker}', 'w')",), "builtins.eval"),
        (getattr, (str, "join"), "builtins.unicode"),  # the name of str in protocol 2
        (getattr, (OrderedDict, "fromkeys"), "builtins.getattr"),
        # pickle's name for subprocess in protocol 2
        (subprocess.check_output, (["touch", "{marker}"],), "commands.check_output"),
        (torch.load, ("{marker}",), "torch.serialization.load"),
        (pickle.loads, (b"cos\nsystem\n(S'touch {marker}'\ntR.",), "pickle.loads"),
    ],
)
def test_nothing_in_a_file_is_run(function: Any, arguments: tuple[Any, ...], name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    filled = [argument.format(marker=marker) if isinstance(argument, str) else argument for argument in arguments]
    torch.save({"model": Attack(function, *filled)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=f"contains a call of {name}, .*nothing was run"):
        TorchArchive(tmp_path / "x.pt")
    assert not marker.exists()


def rewritten(source: Path, target: Path, change: dict[str, bytes | None], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for member in old.infolist():
            content = change.get(member.filename.partition("/")[2], old.read(member))
            if content is not None:
                new.writestr(member.filename, content)
    return target


def test_damage_is_named(tmp_path: Path) -> None:
    good = tmp_path / "x.pt"
    torch.save({"w": torch.arange(1000.0)}, good)
    with pytest.raises(CheckpointError, match="has no readable storage 0"):
        TorchArchive(rewritten(good, tmp_path / "a.pt", {"data/0": None})).content["w"].read()
    with pytest.raises(CheckpointError, match="has no readable storage 0"):
        TorchArchive(rewritten(good, tmp_path / "b.pt", {}, zipfile.ZIP_DEFLATED)).content["w"].read()
    with pytest.raises(CheckpointError, match=r"shape \[1000\], which is larger than its storage 0"):
        TorchArchive(rewritten(good, tmp_path / "c.pt", {"data/0": b"\0" * 3996})).content["w"].read()
    with pytest.raises(CheckpointError, match="damaged pickle"):
        TorchArchive(rewritten(good, tmp_path / "d.pt", {"data.pkl": b"\x80\x02}q\x00."[:-1]}))
    with pytest.raises(CheckpointError, match=r"without a data\.pkl"):
        TorchArchive(rewritten(good, tmp_path / "e.pt", {"data.pkl": None}))
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchArchive(rewritten(good, tmp_path / "f.pt", {"byteorder": b"big"}))
    (tmp_path / "g.pt").write_bytes(good.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match="not a zip archive"):
        TorchArchive(tmp_path / "g.pt")
    torch.save({"w": 1}, tmp_path / "h.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"not a zip archive, which torch\.save writes since torch 1\.6"):
        TorchArchive(tmp_path / "h.pt")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TorchArchive(tmp_path / "none.pt")
