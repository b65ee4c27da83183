"""Manipulated checkpoints and models from untrusted sources.

Each is refused with an error that names the file, before it costs memory. No file from outside the model's folder is
published, and names are escaped before they are printed.
"""

from __future__ import annotations

import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from frontier_llm import files
from frontier_llm.checkpoint import directory as folder
from frontier_llm.checkpoint import manifest
from frontier_llm.checkpoint.inspect import verify
from frontier_llm.checkpoint.manifest import DamagedCheckpoint
from frontier_llm.cli.main import main
from frontier_llm.data.tokenizer import load_tokenizer
from frontier_llm.errors import CheckpointError, DataError
from frontier_llm.interop.huggingface import HuggingFaceModel, tokenizer_files
from frontier_llm.interop.megatron import archive
from frontier_llm.interop.megatron.weights import MegatronModel
from frontier_llm.run.complete import digest_line
from tests.attacks.fuzz import MOST_GROWTH_KIB
from tests.unit.checkpoint.simulated import TINY, Layout, write


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write(TINY, Layout(tp=2), tmp_path / "checkpoints", config={"model": {"name": "tiny"}})
    return tmp_path / "checkpoints" / "step_00000007"


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and recompute its digests, as an attacker can."""
    content = json.loads((checkpoint / folder.MANIFEST).read_text())
    change(content)
    content["config_sha256"] = manifest.config_digest(content["config"])
    data = json.dumps(content).encode()
    (checkpoint / folder.MANIFEST).write_bytes(data)
    (checkpoint / folder.MANIFEST_DIGEST).write_bytes(digest_line(data))


def overlap(content: dict[str, Any]) -> None:
    """Move the second half of a matrix onto the first half: the number of elements stays correct, but a hole
    remains.
    """
    name = next(i for i, tensor in enumerate(content["tensors"]) if tensor["name"] == "layers.0.mlp.down.weight")
    piece = next(piece for piece in content["shards"][1]["pieces"] if piece[0] == name)
    assert any(piece[1])
    piece[1] = [0] * len(piece[1])


def progress(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["progress"].update(values)


def shard_file(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["shards"][0].update(file=name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (overlap, "layers.0.mlp.down.weight .* pieces that overlap or leave a gap"),
        (progress(loss_scale=-1.0), "progress.loss_scale"),
        (progress(loss_scale=0.0), "progress.loss_scale"),
        (progress(optimizer_updates=8), "optimizer_updates is 8 after 7 steps"),
        (progress(skipped_steps=2**50), "skipped_steps is 1125899906842624 after 7 steps"),
        (progress(scaler_clean_steps=8), "scaler_clean_steps is 8 after 7 steps"),
        (progress(policy={"best": {"step": 8, "loss": 1.0}}), "policy.best is of step 8 after 7 steps"),
        (progress(policy={"best": {"x": 1}}), "policy.best is .*, expected a step and a loss"),
        (progress(policy={"left_out_steps": -1}), "policy.left_out_steps is -1"),
        (progress(policy={"left_out_steps": True}), "policy.left_out_steps is True"),
        (progress(policy={"rewinds": [{"step": 2**40}]}), "policy.rewinds is not a list of rewinds to a step up to 7"),
        (progress(policy={"rewinds": 5}), "policy.rewinds is not a list"),
        (progress(policy={"losses": [[]]}), "policy.losses is not a list of finite numbers"),
        (shard_file("shard_0000\u0660.safetensors"), "not the name of a shard"),  # an Arabic-Indic zero
        (shard_file("../shard_00000.safetensors"), "not the name of a shard"),
        (shard_file("/etc/passwd"), "not the name of a shard"),
        (shard_file("shard_00000.safetensors/x"), "not the name of a shard"),
        (shard_file("shard_1.safetensors"), "not the name of a shard"),
        (shard_file("shard_00000.bin"), "not the name of a shard"),
    ],
)
def test_a_manifest_that_no_run_wrote(change: Callable[[dict[str, Any]], None], said: str, checkpoint: Path) -> None:
    assert verify(checkpoint) == []
    rewrite(checkpoint, change)
    with pytest.raises(DamagedCheckpoint, match=said):
        folder.read_manifest(checkpoint)


def test_pieces_tile_their_tensor_exactly() -> None:
    def fits(whole: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
        rows = [(-1, 0, *(0,) * len(whole), *whole)]
        rows += [
            (1, 0, *offset, *(first + size for first, size in zip(offset, shape, strict=True)))
            for offset, shape in boxes
        ]
        return not manifest._uncovered(np.array(rows), len(whole))

    assert fits((), ((), ())) and not fits((), ((), ()), ((), ())) and not fits((4,))
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert fits((3, 3), *pinwheel, ((1, 1), (1, 1))) and not fits((3, 3), *pinwheel, ((0, 0), (1, 1)))
    assert not fits((2, 2), ((0, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1)))


def test_two_million_tensors_are_not_read(tmp_path: Path) -> None:
    tensors = b",".join(b'{"name":"t%d","shape":[1]}' % number for number in range(1_000_000))
    with pytest.raises(DamagedCheckpoint, match=r"lists \d+ values, more than the limit of"):
        manifest.parse(b'{"tensors":[' + tensors + b"]}", "manifest.json")


def test_a_bound_is_lifted_by_whom_it_is_in_the_way_of(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_VALUES", 100)
    for times, code in ((None, 1), ("1000", 0), ("1", 1), ("0", 2), ("many", 2), ("1e3", 2)):
        monkeypatch.delenv(files.LIFT_VARIABLE, raising=False)
        if times is not None:
            monkeypatch.setenv(files.LIFT_VARIABLE, times)
        assert main(["checkpoint", "verify", str(checkpoint)]) == code, capsys.readouterr()
        said = "".join(capsys.readouterr())
        assert (f"{files.LIFT_VARIABLE}=N to allow N times as much" in said) == (code == 1)
    monkeypatch.delenv(files.LIFT_VARIABLE)
    files.lift_bounds(None)


def save_zip(path: Path, pickled: bytes, **members: bytes) -> None:
    """Write a file in the layout that torch.save uses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": pickled, **members}.items():
            archive.writestr(f"archive/{name}", content)


PICKLES = {
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "memo": b"\x80\x02]r" + struct.pack("<I", (1 << 31) - 1) + b".",
    "long": b"\x80\x02\x8b" + struct.pack("<i", (1 << 31) - 1) + b"\x01.",
    "deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "nothing": b"\x80\x02.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_with_absurd_lengths(name: str, tmp_path: Path) -> None:
    save_zip(tmp_path / "mp_rank_00" / "model_optim_rng.pt", PICKLES[name])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        MegatronModel(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_GROWTH_KIB


def test_a_member_is_not_read_for_its_claims(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    save_zip(path, pickle.dumps({}), byteorder=b"little" * 1000)
    with pytest.raises(CheckpointError, match="big-endian"):
        MegatronModel(tmp_path)
    save_zip(path, b"x" * (archive.MAX_PICKLE_BYTES + 1))
    with pytest.raises(CheckpointError, match=r"data\.pkl of \d+ bytes, more than the limit of \d+"):
        MegatronModel(tmp_path)


def test_a_long_list_of_members_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    save_zip(path, pickle.dumps({}))
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, content.rindex(b"PK\x05\x06") + 12, 1 << 31)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="has a table of contents of 2147483648 bytes, more than"):
        MegatronModel(tmp_path)


@pytest.mark.parametrize("packed", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2], ids=["xz", "bzip2"])
def test_members_that_unpack_without_a_bound(packed: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model_optim_rng.pt", "w", packed) as file:
        file.writestr("archive/data.pkl", bytes(15 << 20))
    with pytest.raises(CheckpointError, match="is compressed with bzip2 or LZMA"):
        archive.TorchArchive(tmp_path / "model_optim_rng.pt")


def test_a_rank_with_an_absurd_number(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_99999999_99999999").mkdir()
    save_zip(tmp_path / "mp_rank_99999999_99999999" / "model_optim_rng.pt", pickle.dumps({}))
    with pytest.raises(CheckpointError, match="mp_rank_00_000: is missing"):
        MegatronModel(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "..", ".", "a/b", "\u00b2", "x" * 100_000, "global\x1b[2J"])
@pytest.mark.parametrize("tracker", ["latest", "latest_checkpointed_iteration.txt"])
def test_a_tracker_names_a_folder_beside_it(tracker: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory = tmp_path / "given"
    directory.mkdir()
    (directory / tracker).write_text(name)
    with pytest.raises(CheckpointError, match=r"which is not the name of a folder|which does not exist"):
        MegatronModel(directory)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (json.dumps({**LLAMA, "num_hidden_layers": 60_000}), "has 60000 layers, more than the 1 tensors in the files"),
        (json.dumps({**LLAMA, "num_hidden_layers": 10**9}), "layers: is more than"),
        (json.dumps({**LLAMA, "hidden_size": 10**40}), "hidden: is more than"),
        (json.dumps({**LLAMA, "rope_theta": 10**400}), "has an unexpected value"),
        ("[" * 100_000, "is not JSON"),
        ('{"vocab_size": ' + "9" * 100_000 + "}", "is not JSON"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "more bytes than the limit of 1048576"),
        (json.dumps({**LLAMA, "architectures": [7, {}]}), "is not supported"),
    ],
)
def test_config_json_bombs(config: str, said: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=said):
        HuggingFaceModel(tmp_path)


def test_long_headers_and_indices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 90_000_000) + b" " * 90_000_000)
    with pytest.raises(CheckpointError, match="header of 90000000 bytes, more than the limit of 16777216"):
        HuggingFaceModel(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(" " * (1 << 26))
    with pytest.raises(CheckpointError, match="more bytes than the limit of 33554432"):
        HuggingFaceModel(tmp_path)


def test_a_tokenizers_file_that_points_outside_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    home = tmp_path / "model"
    home.mkdir()
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<|endoftext|>": 0}, merges=[]))
    model.save(str(home / "tokenizer.json"))
    assert tokenizer_files(load_tokenizer(str(home)), 8)
    (home / "merges.txt").symlink_to("../secret")
    with pytest.raises(DataError, match="outside of its directory"):
        tokenizer_files(load_tokenizer(str(home)), 8)


def test_names_from_files_do_not_command_the_terminal(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(checkpoint, lambda content: content["config"]["model"].update(name="\x1b]0;owned\x07"))
    rewrite(checkpoint, lambda content: content.update(layout={"\x1b[2J": 2}))
    (checkpoint / "x\x1b[31m").write_text("")
    main(["checkpoint", "list", str(checkpoint)])
    main(["checkpoint", "verify", str(checkpoint)])
    main(["checkpoint", "diff", str(checkpoint), str(checkpoint)])
    output = "".join(capsys.readouterr())
    assert "owned" in output and "\x1b" not in output and "\x07" not in output
