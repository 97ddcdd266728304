"""The forms in which trainers put tensors into a request of SGLang's weight routes, made by torch's own pickling: what
the tests send is what a trainer sends, and nothing of this project's writer takes part."""

import base64
import contextlib
import dataclasses
import hashlib
import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"


def text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def plain(payload, protocol=None) -> str:
    """base64(pickle): the tensors' bytes are in the text."""
    return text(pickle.dumps(payload, protocol=protocol))


@contextlib.contextmanager
def sharing(strategy):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def forked(payload, strategy="file_system") -> str:
    """base64(ForkingPickler): names of shared memory. The payload's tensors must live until the reply."""
    with sharing(strategy):
        out = io.BytesIO()
        ForkingPickler(out).dump(payload)
        return text(out.getvalue())


def saved(payload, legacy) -> str:
    """base64(torch.save), in the zip form and the one before it."""
    out = io.BytesIO()
    torch.save(payload, out, _use_new_zipfile_serialization=not legacy)
    return text(out.getvalue())


def bucket_metadata_class():
    """A class of the name and module that pickles of SGLang's buckets refer to."""
    if BUCKET_MODULE in sys.modules:
        return sys.modules[BUCKET_MODULE].FlattenedTensorMetadata
    metadata = dataclasses.make_dataclass(
        "FlattenedTensorMetadata", ["name", "shape", "dtype", "start_idx", "end_idx", "numel"])
    metadata.__module__ = BUCKET_MODULE
    parts = BUCKET_MODULE.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    sys.modules[BUCKET_MODULE].FlattenedTensorMetadata = metadata
    return metadata


def flattened(named, old=False) -> dict:
    """One flat tensor and where each tensor lies in it: in bytes over uint8, or (old) in elements of one dtype."""
    metadata_class = bucket_metadata_class()
    parts, metadata, at = [], [], 0
    for name, tensor in named:
        flat = tensor.detach().contiguous().flatten()
        part = flat if old else flat.view(torch.uint8)
        metadata.append(metadata_class(
            name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=at, end_idx=at + part.numel(),
            numel=part.numel()))
        parts.append(part)
        at += part.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}


def sha256(tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def manifest(adapters: dict) -> dict:
    """{adapter: {key: sha256}} of {adapter: {key: tensor}}."""
    return {name: {key: sha256(tensor) for key, tensor in tensors.items()} for name, tensors in adapters.items()}


def buckets(named, most_bytes):
    """Lists of (name, tensor) below most_bytes each; a larger tensor goes alone."""
    bucket, size = [], 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes >= most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
