"""libheadrace.so by ctypes: the structures and functions of headrace/publisher.h, as they stand there.

The library lies beside this file. HEADRACE_LIBRARY names another one, for work on the library itself.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import struct
from ctypes import POINTER, Structure, c_bool, c_char, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64
from ctypes import c_void_p
from typing import Any

MAX_DIMS = 8
# hr_tensor: name, dtype, ndim, shape, data, bytes
TENSOR = struct.Struct(f"=QiI{MAX_DIMS}QQQ")
TENSOR_BYTES, TENSOR_WORDS = TENSOR.size, TENSOR.size // 8
# where its fields begin, in words; kind: dtype and ndim, half a word each
NAME_WORD, KIND_WORD, SHAPE_WORD, DATA_WORD, SIZE_WORD = 0, 1, 2, 2 + MAX_DIMS, 3 + MAX_DIMS

# hr_dtype, by torch's names
DTYPES = {
    "bool": 0, "uint8": 1, "int8": 2, "float8_e5m2": 3, "float8_e4m3fn": 4, "int16": 5, "uint16": 6, "float16": 7,
    "bfloat16": 8, "int32": 9, "uint32": 10, "float32": 11, "float64": 12, "int64": 13, "uint64": 14,
}
# and by those of the safetensors format
SAFETENSORS_DTYPES = {
    "BOOL": 0, "U8": 1, "I8": 2, "F8_E5M2": 3, "F8_E4M3": 4, "I16": 5, "U16": 6, "F16": 7,
    "BF16": 8, "I32": 9, "U32": 10, "F32": 11, "F64": 12, "I64": 13, "U64": 14,
}

OK, ERR_PEER, ERR_INTERNAL = 0, 500, 605
PAUSES = {None: 0, "in_place": 1, "retract": 2, "abort": 3}


class Error(Structure):
    _fields_ = [("status", c_int), ("message", c_char * 1024)]


class Unit(Structure):
    _fields_ = [("tensors", c_void_p), ("n", c_size_t), ("adapter", c_char_p), ("owner", c_void_p),
                ("release", c_void_p)]


NEXT = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(Unit), POINTER(Error))
RELEASE = ctypes.CFUNCTYPE(None, c_void_p)


class UnitSource(Structure):
    _fields_ = [("self", c_void_p), ("next", NEXT)]


class PushAdapter(Structure):
    _fields_ = [("name", c_char_p), ("config", c_char_p), ("config_len", c_size_t), ("pinned", c_bool)]


class Push(Structure):
    _fields_ = [("adapters", POINTER(PushAdapter)), ("n_adapters", c_size_t), ("sync_base", c_bool),
                ("complete_base", c_bool), ("weight_version", c_char_p), ("session_id", c_char_p),
                ("total_bytes", c_uint64), ("unchanged", c_bool), ("source", UnitSource)]


EACH = ctypes.CFUNCTYPE(None, c_void_p, c_uint32, c_char_p, c_size_t)
ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, EACH, c_void_p, POINTER(Error))


class Group(Structure):
    _fields_ = [("self", c_void_p), ("rank", c_uint32), ("size", c_uint32), ("allgather", ALLGATHER)]


class Progress(Structure):
    _fields_ = [("bytes", c_uint64), ("total_bytes", c_uint64), ("rate", c_double), ("stage", c_char_p)]


PROGRESS = ctypes.CFUNCTYPE(c_bool, c_void_p, POINTER(Progress))


class PublisherOptions(Structure):
    _fields_ = [("engines", POINTER(c_char_p)), ("n_engines", c_size_t), ("api_key", c_char_p),
                ("transport", c_char_p), ("bucket_bytes", c_uint64), ("timeout_ms", c_uint64), ("lease_ms", c_uint64),
                ("audit", c_bool), ("pause", c_int), ("group", POINTER(Group)), ("progress", PROGRESS),
                ("progress_ctx", c_void_p)]


class PushEngine(Structure):
    _fields_ = [("url", c_char_p), ("state", c_char_p), ("instance", c_char_p), ("weight_version", c_char_p),
                ("base_mode", c_char_p), ("ranks", c_uint64), ("tensors", c_uint64), ("bytes", c_uint64),
                ("has_xxh3", c_bool), ("xxh3", c_uint8 * 16), ("receive_ns", c_uint64), ("verify_ns", c_uint64),
                ("build_ns", c_uint64), ("publish_ns", c_uint64), ("retries", c_uint64), ("error", c_char_p),
                ("received", c_char_p)]


class PushReceipt(Structure):
    _fields_ = [("session_id", c_char_p), ("transport", c_char_p), ("weight_version", c_char_p), ("skipped", c_bool),
                ("commit_begun", c_bool), ("atomic", c_bool), ("rank", c_uint32), ("ranks", c_uint32),
                ("tensors", c_uint64), ("bytes", c_uint64), ("sent_tensors", c_uint64), ("sent_bytes", c_uint64),
                ("buckets", c_uint64),
                ("xxh3", c_uint8 * 16), ("pause_ns", c_uint64), ("register_ns", c_uint64), ("begin_ns", c_uint64),
                ("stream_ns", c_uint64), ("prepare_ns", c_uint64), ("commit_ns", c_uint64), ("total_ns", c_uint64),
                ("engines", POINTER(PushEngine)), ("n_engines", c_size_t)]


def _load() -> ctypes.CDLL:
    path = os.environ.get("HEADRACE_LIBRARY") or pathlib.Path(__file__).with_name("libheadrace.so")
    library = ctypes.CDLL(str(path))
    receipt, error = POINTER(POINTER(PushReceipt)), POINTER(Error)
    signatures = {
        "hr_version": (c_char_p, []),
        "hr_status_name": (c_char_p, [c_int]),
        "hr_publisher_create": (c_int, [POINTER(PublisherOptions), POINTER(c_void_p), error]),
        "hr_publisher_destroy": (None, [c_void_p]),
        "hr_publisher_push": (c_int, [c_void_p, POINTER(Push), receipt, error]),
        "hr_publisher_resume": (c_int, [c_void_p, c_char_p, c_char_p, receipt, error]),
        "hr_publisher_report": (c_char_p, [c_void_p]),
        "hr_push_receipt_json": (c_char_p, [POINTER(PushReceipt)]),
        "hr_push_receipt_free": (None, [POINTER(PushReceipt)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


LIBRARY = _load()


def text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def fill_error(error: Any, status: int, message: str) -> int:
    """What a callback that fails hands to the library; returns the status."""
    error[0].status = status
    error[0].message = message.encode()[:1023].decode("utf-8", "ignore").encode()
    return status
