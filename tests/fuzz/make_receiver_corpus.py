"""Writes the seeds of tests/fuzz/corpus/receiver: calls of a trainer as fuzz_receiver.c reads them."""

import hashlib
import pathlib

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus" / "receiver"


def text(value):
    return b"\xff" if value is None else bytes([len(value)]) + value.encode()


def register(name, config="{}", defer=False):
    return bytes([0, defer]) + text(name) + text(config)


def begin(session=None, sync_base=True, audit=False, adapters=None):
    flags = sync_base | audit << 1 | (session is not None) << 2 | (adapters is not None) << 3 | bool(adapters) << 4
    return bytes([1, flags]) + (text(session) if session else b"") + (text(adapters[0]) if adapters else b"")


def tensors(values):
    return bytes([len(values)]) + b"".join(text(n) + bytes([len(v)]) + v.encode() for n, v in values.items())


def bucket_body(values, adapter=None, session=None, stream=None, index=0, version=None, owned=False, flush=False):
    flags = (flush | (adapter is not None) << 1 | (session is not None) << 2 | (stream is not None) << 3 |
             (version is not None) << 4 | owned << 5 | index << 6)
    rest = b"".join(text(t) for t in (adapter, session, stream, version) if t is not None)
    return bytes([flags]) + tensors(values) + rest


def bucket(values, **options):
    return b"\x02" + bucket_body(values, **options)


def end_body(session=None, version=None, manifest=None, covers_base=False, audit=False, complete=False):
    flags = (7 if complete else 0) | audit << 3 | (session is not None) << 4 | (version is not None) << 5
    flags |= (manifest is not None) << 6 | covers_base << 7
    body = bytes([flags]) + b"".join(text(t) for t in (session, version) if t is not None)
    if manifest is not None:
        body += bytes([len(manifest)]) + b"".join(text(n) + text(s) + text(x) for n, s, x in manifest)
    return body


def sha256(value):
    return hashlib.sha256(value.encode()).hexdigest()


A, B = "x:q.lora_A.weight", "x:q.lora_B.weight"
SEEDS = {
    "adapter": register("x") + begin("s", sync_base=False) + bucket({A: "1", B: "2"}) + b"\x05" + end_body("s", "v1"),
    "two-phases": register("x") + begin("s") + bucket({A: "1", "base": "2"}, session="s") + b"\x03" +
    end_body("s", audit=False) + b"\x04" + text("s") + b"\x04" + text("s"),
    "manifest": register("x", defer=True) + begin("s", sync_base=False) + bucket({A: "1"}, owned=True) + b"\x05" +
    end_body("s", "v1", [(A, sha256("1"), None)], True),
    "wrong-digest": register("x") + begin("s") + bucket({A: "1"}) + b"\x05" + end_body("s", None, [(A, sha256("2"), "0" * 32)]),
    "twice": register("x") + begin("s") + bucket({A: "1"}, stream="r") * 2 + bucket({B: "1"}, stream="r", index=1) + b"\x06" +
    text(None),
    "audit": begin("s", audit=True) + bucket({"a": "", "b": "2"}) + b"\x05" + end_body("s", audit=True),
    "incomplete-base": begin("s") + bucket({"a": "1"}, flush=True, version="v") + b"\x05" + end_body(complete=True),
    "unknown-weight": begin("s") + bucket({"unknown": "1"}) + bucket({"a": "1"}) + b"\x05" + end_body(),
    "late": register("x") + begin("s") + bucket({A: "1"}) + b"\x03" + end_body("s", "t") + b"\x04" + text("s") + b"\x06" + text("s"),
    "load": b"\x07\x00" + text("x") + text("{}") + bucket_body({"q.lora_A.weight": "1"}, adapter="x", session="l") + end_body(),
    "load-base": b"\x07\x00" + text(None) + text(None) + bucket_body({"a": "1"}) + end_body(version="v"),
    "failed-build": register("x") + begin("s") + bucket({A: "U"}) + b"\x05" + end_body("s"),
    "declared": register("x") + begin("s", adapters=["x"]) + bucket({"a": "1"}) + b"\x05" + end_body("s"),
    "names": begin("s") + bucket({"lora_A.weight": "1"}) + bucket({":": "1"}) + bucket({"q.base_layer.weight": "1"}) +
    bucket({"\n": "1"}),
    "unload": register("x") + b"\x08" + text("x") + b"\x08" + text(None) + text("v2"),
}

if __name__ == "__main__":
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, data in SEEDS.items():
        (CORPUS / name).write_bytes(data)
