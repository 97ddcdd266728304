"""Writes the seeds of tests/fuzz/corpus/torch_payload with torch itself: small payloads of every form, good and bad. The
unit test of the reader reads some of them by name. Wants torch; what it writes is committed, so that a build needs none."""

import base64
import collections
import dataclasses
import io
import os
import pathlib
import pickle
import sys
import types

import torch
import torch.multiprocessing
from multiprocessing.reduction import ForkingPickler

OUT = pathlib.Path(__file__).parent / "torch_payload"


def put(name, data):
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_bytes(data)


def data_class(module, name, fields):
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(parts[i - 1]))
    made = dataclasses.make_dataclass(name, fields)
    made.__module__ = module
    setattr(sys.modules[module], name, made)
    return made


def weights():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    return {"whole": base.bfloat16(), "row": base[1], "transposed": base.t(), "steps": base[::2, 1::2], "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3), "expanded": base[:1].expand(2, 4), "f8": base[0].to(torch.float8_e4m3fn),
            "parameter": torch.nn.Parameter(base[2].clone())}


def make_plain():
    for protocol in (2, 3, 4, 5):
        put(f"pairs-{protocol}", pickle.dumps(list(weights().items()), protocol=protocol))
    put("dict", pickle.dumps(weights(), protocol=4))
    put("ordered", pickle.dumps(collections.OrderedDict(weights()), protocol=4))
    put("state-dict", pickle.dumps(torch.nn.Linear(2, 3).state_dict(), protocol=4))
    put("shared-storage", pickle.dumps({"a": torch.ones(4)[:2], "b": torch.ones(4)[1:]}, protocol=4))
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.float64, torch.uint16, torch.complex64):
        put(str(dtype).removeprefix("torch."), pickle.dumps({"w": torch.arange(4).to(dtype)}, protocol=4))
    noted = torch.ones(2)
    noted.note = "x"
    put("attributes", pickle.dumps({"w": noted}, protocol=4))
    put("twice", pickle.dumps([("w", torch.ones(1)), ("w", torch.ones(1))], protocol=4))
    put("empty-list", pickle.dumps([]))


def make_saved():
    for zipped in (False, True):
        stream = io.BytesIO()
        torch.save({"w": torch.arange(3.0), "v": torch.arange(4)}, stream, _use_new_zipfile_serialization=zipped)
        put("saved-zip" if zipped else "saved-legacy", stream.getvalue())


def make_buckets():
    metadata = data_class("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata",
                          ["name", "shape", "dtype", "start_idx", "end_idx", "numel"])
    new = [metadata("a", torch.Size([3]), torch.bfloat16, 0, 6, 6), metadata("b", torch.Size([1, 2]), torch.float32, 6, 14, 8)]
    old = [metadata("a", torch.Size([3]), torch.float32, 0, 3, 3), metadata("b", torch.Size([]), torch.float32, 3, 4, 1)]
    overlap = [metadata("a", torch.Size([3]), torch.bfloat16, 0, 6, 6), metadata("b", torch.Size([2]), torch.float32, 4, 12, 8)]
    flat = torch.arange(14, dtype=torch.uint8)
    put("bucket-new", pickle.dumps({"flattened_tensor": flat, "metadata": new}, protocol=4))
    put("bucket-dicts", pickle.dumps({"flattened_tensor": flat, "metadata": [
        dict(vars(entry), shape=tuple(entry.shape)) for entry in new]}, protocol=4))
    put("bucket-old", pickle.dumps({"flattened_tensor": torch.arange(4.0), "metadata": old}, protocol=4))
    put("bucket-overlap", pickle.dumps({"flattened_tensor": flat, "metadata": overlap}, protocol=4))
    local = data_class("sglang.srt.model_executor.model_runner", "LocalSerializedTensor", ["values"])
    values = [pickle.dumps(torch.full((2,), float(r)), protocol=4) for r in range(2)]
    put("local", pickle.dumps([("w", local(values))], protocol=4))


def make_references():
    tensor = torch.arange(3.0)
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    put("file-descriptor", bytes(ForkingPickler.dumps([("w", tensor)])).replace(b"/tmp/", b"/run/"))
    torch.multiprocessing.set_sharing_strategy("file_system")
    payload = bytes(ForkingPickler.dumps([("w", tensor.clone())])).replace(b"/tmp/", b"/run/")
    name = next(n for n in os.listdir("/dev/shm") if n.startswith(f"torch_{os.getpid()}_")).encode()
    put("file-system", payload.replace(b"/" + name, b"/torch_" + b"0" * (len(name) - 6)))
    for module in ("torch.multiprocessing.reductions", "sglang.srt.utils.patch_torch"):
        function = "rebuild_cuda_tensor" if module.startswith("torch") else "_rebuild_cuda_tensor_modified"
        put(f"cuda-{module.split('.')[0]}", f"\x80\x02c{module}\n{function}\n)R.".encode("latin1"))


def make_hostile():
    put("os-system", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")
    put("eval", b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.")
    put("marks", b"\x80\x04" + b"(" * 300)
    put("frame", b"\x80\x04\x95" + b"\xff" * 8)
    put("memo", b"\x80\x04Nr\xff\xff\xff\xff.")
    put("bytes", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f")
    put("buffer", b"\x80\x05\x97.")
    put("huge", pickle.dumps({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, protocol=4))
    put("itself", b"\x80\x04]\x94h\x00h\x00a.")


if __name__ == "__main__":
    make_plain()
    make_saved()
    make_buckets()
    make_references()
    make_hostile()
    put("base64", base64.b64encode(bytes(range(64))))
    put("base64-padded", b"QUI=")
