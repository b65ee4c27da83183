"""Read a file of torch.save (the zip format, torch 1.6 and later) without running code that the file names.

Such a file holds a pickle, `data.pkl`, which names classes and functions to call, and one uncompressed member per
storage. Here every name in the pickle is replaced by an inert object of this module, and no name is ever imported.
Tensors become descriptions that are mapped from the file when they are read. Plain containers (list, dict, tuple) are
built unchanged. Records of the packages that write training checkpoints become an `Opaque`, which only stores its
arguments. Any other name is refused before anything is built.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frontier_llm.errors import CheckpointError
from frontier_llm.files import LIFT_HINT, lifted_bound
from frontier_llm.units import MIB

MAX_PICKLE_BYTES = 16 * MIB  # names, shapes and arguments; the tensors' values are in other members.
# Only these compression methods are accepted. With other methods, zipfile may decompress more data than was requested.
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MAX_DIRECTORY_BYTES = 16 * MIB  # limit for the zip's list of members, enough for about 150,000
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")  # header of a zip member; name, extra field and data follow
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_STORAGES.values(), torch.complex64)}
# packages whose records (enums, generator states, optimizer bookkeeping) are stored with the weights in training
# checkpoints
_RECORDS = ("megatron.", "deepspeed.", "transformer_engine.", "apex.", "numpy.", "pathlib.")
_RECORD_NAMES = {"torch.device", "torch.Generator", "_io.BytesIO", "io.BytesIO"}


class Opaque:
    """Record of a known package that a pickle builds. Only the name, the arguments and the state are stored."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any, **options: Any) -> Opaque:
        """Store the arguments. A pickle's NEWOBJ calls this method too."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the contents of a record that is a container."""

    def extend(self, items: Any) -> None:
        """Ignore the contents of a record that is a container."""

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Namespace:
    """Replacement of argparse.Namespace and types.SimpleNamespace, with attributes only."""


@dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor's values in a file."""

    archive: TorchArchive
    key: str  # key of the storage in the file
    dtype: torch.dtype
    offset: int  # index of the tensor's first element in its storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the tensor, mapped from the file, so that pages are read when they are used.

        Raises CheckpointError if the tensor is not inside its storage.
        """
        try:
            storage = self.archive.storage(self.key, self.dtype)
            # Refuse a tensor that repeats elements of its storage, because a copy of it could have any size.
            if prod(self.shape) > len(storage):
                raise RuntimeError
            return storage.as_strided(self.shape, self.stride, self.offset)
        except RuntimeError as error:
            what = f"has a tensor of shape {list(self.shape)}, which is larger than its storage {self.key}"
            raise CheckpointError(what, where=str(self.archive.path), fix="copy the file again") from error


class TorchArchive:
    """One file. `content` is the saved object, with a StoredTensor for every tensor."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises CheckpointError if the file is missing, truncated or in another format. Also raises CheckpointError if
        its pickle has a name that is not known to be harmless.
        """
        self.path = path
        try:
            _check_directory(path)
            with zipfile.ZipFile(path) as archive:
                self._members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
                pickled = self._pickled(archive)
        except OSError as error:
            raise CheckpointError(
                f"cannot be read: {error.strerror or error}",
                where=str(path),
                fix="copy the complete checkpoint",
            ) from error
        except (
            zipfile.BadZipFile,
            zlib.error,
            struct.error,
            NotImplementedError,
            RuntimeError,
            ValueError,
            EOFError,
        ) as error:
            what = f"is not a zip archive, which torch.save writes since torch 1.6 ({error})"
            raise CheckpointError(
                what,
                where=str(path),
                fix="copy the file again; if an older torch wrote it, save it again",
            ) from error
        try:
            _check_pickle(pickled)
            self.content = _Unpickler(pickled, self).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise CheckpointError(
                f"contains a damaged pickle: {error}",
                where=str(path),
                fix="copy the file again",
            ) from error

    def _pickled(self, archive: zipfile.ZipFile) -> bytes:
        member = self._members.get("data.pkl")
        if member is None or member.file_size > lifted_bound(MAX_PICKLE_BYTES):
            what = "is a zip archive without a data.pkl"
            if member is not None:
                most = lifted_bound(MAX_PICKLE_BYTES)
                what = f"has a data.pkl of {member.file_size} bytes, more than the limit of {most}; {LIFT_HINT}"
            raise CheckpointError(what, where=str(self.path), fix="give a file that torch.save wrote")
        order = self._members.get("byteorder")
        if any(part is not None and part.compress_type not in _BOUNDED for part in (member, order)):
            raise CheckpointError(
                "is compressed with bzip2 or LZMA, which torch.save never uses",
                where=str(self.path),
                fix="save it again with torch.save",
            )
        if order is not None and (order.file_size > len("little") or archive.read(order) != b"little"):
            raise CheckpointError(
                "was written on a big-endian machine",
                where=str(self.path),
                fix="save it again on a little-endian one",
            )
        return archive.read(member)

    def storage(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a complete storage as a mapped one-dimensional tensor.

        Raises CheckpointError if the storage is missing, compressed or truncated.
        """
        member = self._members.get(f"data/{key}")
        if member is None or member.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"has no readable storage {key}", where=str(self.path), fix="copy the file again")
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise CheckpointError(f"ends before the storage {key}", where=str(self.path), fix="copy the file again")
        fields = _LOCAL_HEADER.unpack(header)
        start = member.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
        if member.file_size == 0:
            return torch.empty(0, dtype=dtype)
        if start + member.file_size > self.path.stat().st_size:
            raise CheckpointError(f"ends inside the storage {key}", where=str(self.path), fix="copy the file again")
        # copy-on-write, because torch requires writable memory; the file is never written
        mapped = np.memmap(self.path, np.uint8, "c", start, (member.file_size,))
        return torch.from_numpy(mapped).view(dtype)


def _check_directory(path: Path) -> None:
    """Refuse an archive with a long list of members, before zipfile reads the complete list.

    The size of the list is in a record at the file's end, in one of two forms.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 17)))
        tail = file.read()
    for mark, form, place in ((b"PK\x05\x06", "<I", 12), (b"PK\x06\x06", "<Q", 40)):
        at = tail.rfind(mark)
        if at >= 0:
            (size,) = struct.unpack_from(form, tail, at + place)
            if size > lifted_bound(MAX_DIRECTORY_BYTES) and size != 0xFFFFFFFF:
                what = (
                    f"has a table of contents of {size} bytes, more than the limit of "
                    f"{lifted_bound(MAX_DIRECTORY_BYTES)}; {LIFT_HINT}"
                )
                raise CheckpointError(what, where=str(path), fix="give a file that torch.save wrote")


def _check_pickle(content: bytes) -> None:
    """Read the operations of the pickle without running them. Raises ValueError if a stated length or memo number is
    too large.

    The unpickler allocates the sizes that a pickle states before it reads the data: frames, strings, and a table up to
    the highest memo number. Every stated length must therefore be in the file, and a memo number may not exceed the
    number of operations before it.
    """
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise ValueError(f"operation {count} stores its result as number {argument}")


class _Unpickler(pickle.Unpickler):
    """The only unpickler of the package. It looks every name up in tables of inert objects."""

    def __init__(self, content: bytes, archive: TorchArchive) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._archive = archive
        self._builders: dict[str, Any] = {
            "collections.OrderedDict": OrderedDict,
            "argparse.Namespace": Namespace,
            "types.SimpleNamespace": Namespace,
            "builtins.set": set,
            "builtins.frozenset": frozenset,
            "builtins.complex": complex,
            "torch.Size": tuple,
            "_codecs.encode": _encode,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
            "builtins.getattr": self._member,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the inert object for a name, without importing anything."""
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full in self._builders:
            return self._builders[full]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return name
        if full in _RECORD_NAMES or full.startswith(_RECORDS):
            return type("Opaque", (Opaque,), {"name": full})
        raise self._refusal(full)

    def _member(self, record: Any, name: str) -> Opaque:
        """Return an enum's member by its name. Python 3.11.0 to 3.11.3 pickle members as a call of getattr."""
        if isinstance(record, type) and issubclass(record, Opaque):
            return record(name)
        raise self._refusal("builtins.getattr")

    def _refusal(self, name: str) -> CheckpointError:
        what = f"contains a call of {name}, which no Megatron checkpoint needs; nothing was run"
        fix = "do not load this file with other tools if you do not know where it comes from"
        return CheckpointError(what, where=str(self._archive.path), fix=fix)

    def persistent_load(self, identifier: Any) -> Any:
        """Return key and dtype of a storage ("storage", type, key, device, elements)."""
        kind, dtype, key, *_ = identifier
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"unknown reference {identifier!r}")
        return str(key), dtype

    def _tensor(self, storage: tuple[str, torch.dtype], offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        key, dtype = storage
        return StoredTensor(self._archive, key, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Return bytes from their form in pickles of protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in {encoding!r}")
    return text.encode("latin1")
