"""A safetensors file of weights that ranks write and read together, each its own users' rows.

What is in the file does not depend on how many ranks there are: a user table in it is the whole one. Rank 0 writes,
and never holds more than a piece of what another rank has; each rank reads its own rows.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from ncf.distributed import CHUNK, Ranks, rows_of_chunk

DTYPES = {torch.float32: "F32", torch.float64: "F64"}
USERS = "user_embedding"  # how the names of tensors end that have a row a user
LENGTH = 8  # bytes of the header's length, at the file's start; docs of safetensors, "Format"
BLANK = "0" * 64  # stands for the digest until it is known


def write_weights(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], ranks: Ranks, n_users: int) -> None:
    """Write tensors, in order of their names, with `metadata` and their digest; all ranks call this, rank 0 writes.

    Raises OSError where it cannot be written.
    """
    names = sorted(tensors)
    if not ranks.first:
        for name in names:
            if is_by_user(name):
                list(ranks.rows_to_first(tensors[name]))
        return
    shapes = {name: (n_users if is_by_user(name) else len(x), *x.shape[1:]) for name, x in tensors.items()}
    digest = new_digest(metadata)
    with path.open("w+b") as file:
        header = _header(tensors, shapes, metadata | {"sha256": BLANK})
        file.write(header)
        for name in names:
            digest.update(_about(name, tensors[name].dtype, shapes[name]))
            for piece in ranks.rows_to_first(tensors[name]) if is_by_user(name) else _pieces(tensors[name]):
                content = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
                digest.update(content)
                file.write(content)
        _fill_in(file, header, digest.hexdigest())


def read_weights(path: Path, rows: slice) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """Tensors, those with a row a user cut to `rows`; the metadata; and how many users there are in the file."""
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


def digest_of(path: Path, metadata: dict[str, str]) -> str:
    """The digest of what is in the file, some MB of it in memory at a time."""
    digest = new_digest(metadata)
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            shape = tuple(part.get_shape())
            step = max(1, CHUNK // max(1, 4 * torch.Size(shape[1:]).numel()))
            for at in range(0, max(1, shape[0]), step):
                piece = part[at : at + step]
                if at == 0:
                    digest.update(_about(name, piece.dtype, shape))
                digest.update(piece.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def is_by_user(name: str) -> bool:
    """Whether a tensor of that name has a row a user."""
    return name.endswith(USERS)


def new_digest(metadata: dict[str, str]) -> "hashlib._Hash":
    """SHA-256, begun with the state that goes with the tensors."""
    return hashlib.sha256(metadata.get("state", "").encode())


def _about(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype} {shape}".encode()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    for piece in torch.split(tensor.detach(), rows_of_chunk(tensor)):
        yield piece.cpu()


def _header(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]) -> bytes:
    content: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name in sorted(tensors):
        size = torch.Size(shapes[name]).numel() * tensors[name].element_size()
        about = {"dtype": DTYPES[tensors[name].dtype], "shape": list(shapes[name]), "data_offsets": [at, at + size]}
        content[name] = about
        at += size
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text


def _fill_in(file: BinaryIO, header: bytes, digest: str) -> None:
    file.seek(header.index(BLANK.encode()))
    file.write(digest.encode())
