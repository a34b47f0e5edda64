"""A safetensors file of weights that processes write and read together, each its own users' rows.

The file does not depend on how many processes there are: a user table in it is the whole one. Rank 0 writes, and never
holds more than a piece of what another rank has; each rank reads its own rows. The header holds the SHA-256 of the
file with zeros in its place.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ncf.model.neumf import NeuMF
from ncf.parallel.group import CHUNK, ProcessGroup, rows_per_chunk

DTYPES = {torch.float32: "F32", torch.float64: "F64"}
LENGTH = 8  # bytes of the header's length, at the file's start; docs of safetensors, "Format"
BLANK = b"0" * 64  # stands for the digest until it is known


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], group: ProcessGroup, n_users: int
) -> None:
    """Write tensors with `metadata` and the digest; all ranks call this, rank 0 writes. Raises OSError."""
    names = sorted(tensors)
    if not group.is_main:
        for name in filter(is_by_user, names):
            list(group.gather_rows(tensors[name]))
        return
    header = _header(tensors, {**metadata, "sha256": BLANK.decode()}, n_users)
    digest = hashlib.sha256(header)
    with path.open("w+b") as file:
        file.write(header)
        for name in names:
            tensor = tensors[name].detach()
            pieces = group.gather_rows(tensor) if is_by_user(name) else torch.split(tensor, rows_per_chunk(tensor))
            for piece in pieces:
                content = piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(content)
                file.write(content)
        file.seek(header.index(BLANK))
        file.write(digest.hexdigest().encode())


def read_weights(path: Path, rows: slice) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Tensors, those with a row per user cut to `rows`; the metadata; and how many users there are in the file."""
    tensors, n_users = {}, 0
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            part = file.get_slice(name)
            if is_by_user(name):
                n_users = part.get_shape()[0]
            tensors[name] = part[rows.start : rows.stop] if is_by_user(name) else file.get_tensor(name)
        return tensors, file.metadata() or {}, n_users


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata alone."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def digest_of(path: Path, written: str) -> str:
    """The digest that the file should have, where `written` is the one in it."""
    with path.open("rb") as file:
        length = file.read(LENGTH)
        header = length + file.read(int.from_bytes(length, "little"))
        digest = hashlib.sha256(header.replace(written.encode(), BLANK))
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


def is_by_user(name: str) -> bool:
    """Whether a tensor of that name (the model's, or Adam's) has a row per user."""
    return name.rpartition(".")[2] in NeuMF.BY_USER


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], n_users: int) -> bytes:
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in sorted(tensors.items()):
        shape = [n_users if is_by_user(name) else len(tensor), *tensor.shape[1:]]
        size = torch.Size(shape).numel() * tensor.element_size()
        content[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text
