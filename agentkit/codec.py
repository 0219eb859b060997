"""Encode groups, trajectories and columns of tokens as bytes, for the records and checkpoints of a run.

Invariant: decoding returns exactly what was encoded, bit for bit (including NaNs, signed zeros and lone surrogates).
Truncated or altered bytes raise an error.

Format (version 1, little-endian throughout)::

    b"AKR1" | zlib( uint32 header length | header | arrays )

The header is UTF-8 JSON: ``{"kind": "group" | "trajectory" | "columns", "value": …}`` with every field of the
dataclasses of ``agentkit.types``, or every column, under its name. An array is represented by its length; the arrays
follow the header in the order of their lengths (trajectory by trajectory; in each, turn by turn ``prompt_ids``,
``action_ids``, ``action_logprobs``, then ``final_ids``), int32 or float32, without gaps.
zlib's checksum protects the content.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from agentkit.errors import RunDirectoryError
from agentkit.types import FloatArray, Group, Trajectory, Turn

_MAGIC = b"AKR1"
_TURN_ARRAYS = {"prompt_ids": "<i4", "action_ids": "<i4", "action_logprobs": "<f4"}
_TRAJECTORY_ARRAYS = {"final_ids": "<i4"}


def encode_group(group: Group) -> bytes:
    """Encode a group with all its members. Raises ``TypeError`` if an array has not the documented type."""
    arrays: list[bytes] = []
    value = {field.name: getattr(group, field.name) for field in fields(Group) if field.name != "members"}
    value["members"] = [_trajectory_value(member, arrays) for member in group.members]
    return _pack("group", value, arrays)


def decode_group(data: bytes) -> Group:
    """Decode the result of ``encode_group``. Raises ``RunDirectoryError`` if the bytes are damaged."""
    return _unpack(data, "group")


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Encode a trajectory. Raises ``TypeError`` if an array has not the documented type."""
    arrays: list[bytes] = []
    value = _trajectory_value(trajectory, arrays)
    return _pack("trajectory", value, arrays)


def decode_trajectory(data: bytes) -> Trajectory:
    """Decode the result of ``encode_trajectory``. Raises ``RunDirectoryError`` if the bytes are damaged."""
    return _unpack(data, "trajectory")


def encode_columns(columns: Mapping[str, FloatArray]) -> bytes:
    """Encode numbers of tokens by name. Raises ``TypeError`` if one is not a float32 array with one dimension."""
    arrays: list[bytes] = []
    value = {name: _append(column, "<f4", name, arrays) for name, column in columns.items()}
    return _pack("columns", value, arrays)


def decode_columns(data: bytes) -> dict[str, FloatArray]:
    """Decode the result of ``encode_columns``. Raises ``RunDirectoryError`` if the bytes are damaged."""
    return _unpack(data, "columns")


def _pack(kind: str, value: dict[str, Any], arrays: list[bytes]) -> bytes:
    header = json.dumps({"kind": kind, "value": value}, separators=(",", ":"), default=_plain).encode()
    return _MAGIC + zlib.compress(b"".join((struct.pack("<I", len(header)), header, *arrays)), 1)


def _plain(value: Any) -> Any:
    """Convert a numpy scalar, which environments often return instead of a Python number."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be recorded; a trajectory holds numbers, texts and token arrays")


def _trajectory_value(trajectory: Trajectory, arrays: list[bytes]) -> dict[str, Any]:
    value = {field.name: getattr(trajectory, field.name) for field in fields(Trajectory)}
    value["turns"] = [_with_lengths(turn, _TURN_ARRAYS, arrays) for turn in trajectory.turns]
    value["final_ids"] = _append(trajectory.final_ids, "<i4", "final_ids", arrays)
    return value


def _with_lengths(turn: Turn, array_types: dict[str, str], arrays: list[bytes]) -> dict[str, Any]:
    value = {}
    for field in fields(Turn):
        item = getattr(turn, field.name)
        dtype = array_types.get(field.name)
        value[field.name] = item if dtype is None else _append(item, dtype, field.name, arrays)
    return value


def _append(array: np.ndarray, dtype: str, name: str, arrays: list[bytes]) -> int:
    if not isinstance(array, np.ndarray) or array.dtype != np.dtype(dtype) or array.ndim != 1:
        given = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} is {given}; it must be a numpy array, {np.dtype(dtype).name} [n]")
    arrays.append(array.astype(dtype, copy=False).tobytes())
    return len(array)


def _unpack(data: bytes, kind: str) -> Any:
    try:
        if data[:4] != _MAGIC:
            raise ValueError(f"it starts with {bytes(data[:4])!r}, not {_MAGIC!r}")
        body = zlib.decompress(data[4:])
        (length,) = struct.unpack_from("<I", body)
        header = json.loads(body[4 : 4 + length])
        if header["kind"] != kind:
            raise ValueError(f"it holds a {header['kind']}")
        reader = _ArrayReader(body, 4 + length)
        value = header["value"]
        if kind == "trajectory":
            result = _trajectory(value, reader)
        elif kind == "columns":
            result = {name: reader.take(length, "<f4") for name, length in value.items()}
        else:
            members = [_trajectory(member, reader) for member in value.pop("members")]
            result = Group(**value, members=members)
        reader.finish()
        return result
    except (ValueError, KeyError, TypeError, struct.error, zlib.error) as error:
        raise RunDirectoryError(
            f"a recorded {kind} cannot be read back: {error}; it is damaged, or another version of agentkit wrote it"
        ) from error


class _ArrayReader:
    def __init__(self, body: bytes, offset: int) -> None:
        self._body = body
        self._offset = offset

    def take(self, length: int, dtype: str) -> np.ndarray:
        array = np.frombuffer(self._body, dtype, length, self._offset)
        self._offset += array.nbytes
        return array.astype(np.dtype(dtype).newbyteorder("="))

    def finish(self) -> None:
        if self._offset != len(self._body):
            raise ValueError(f"{len(self._body) - self._offset} bytes are left over")


def _trajectory(value: dict[str, Any], reader: _ArrayReader) -> Trajectory:
    turns = []
    for turn in value.pop("turns"):
        for name, dtype in _TURN_ARRAYS.items():
            turn[name] = reader.take(turn[name], dtype)
        turn["versions"] = tuple((version, count) for version, count in turn["versions"])
        turn["actions"] = tuple(turn["actions"])
        turns.append(Turn(**turn))
    for name, dtype in _TRAJECTORY_ARRAYS.items():
        value[name] = reader.take(value[name], dtype)
    value["sandboxes"] = tuple((host, sandbox) for host, sandbox in value.get("sandboxes", ()))
    return Trajectory(**value, turns=turns)
