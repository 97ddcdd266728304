"""Writes the seeds of tests/fuzz/corpus/update_body: arguments of the update routes as JSON (j), as the keys and values of a
query (q), and safetensors bodies (s). Needs torch for the pickles."""

import base64
import json
import pathlib
import pickle
import struct

import torch

CORPUS = pathlib.Path(__file__).resolve().parent / "update_body"
HEX32, HEX64 = "0123456789abcdef" * 2, "0123456789abcdef" * 4


def put(name, data):
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def put_json(name, **args):
    put(name, "j" + json.dumps(args))


def put_query(name, *words):
    put(name, "q" + "\0".join(words))


def image(header, data=b""):
    text = json.dumps(header).encode()
    return b"s" + struct.pack("<Q", len(text)) + text + data


def payload(value, protocol=4):
    return base64.b64encode(pickle.dumps(value, protocol=protocol)).decode()


if __name__ == "__main__":
    small = torch.tensor([[1.0, 2.0]])
    put_json("register", lora_name="a", config_dict={"r": 2, "target_modules": ["q_proj"]}, pinned=True, defer_publish="0",
             added_tokens_config={"<x>": 99, "<y>": "100"})
    put_json("begin", selector="target", sync_base=0, adapters=["a", "b"], lease_seconds="1.5", session_id="s", audit=True)
    put_json("begin-new-names", new_lora_names=["a"], selector="draft")
    put_json("end", expected_lora_checksums={"a": {"x": HEX64, "y": None}}, abort="false")
    put_json("manifest", manifest={"a:x": {"xxh3": HEX32, "sha256": HEX64}, "y": HEX32, "z": HEX64, "w": None}, covers_base=True)
    put_json("manifest-list", manifest=["a:x", "y", 5])
    put_json("manifest-wrong", manifest={"a": {"md5": HEX32}}, expected_lora_checksums={})
    put_json("checksums", expected_checksums={"x": HEX64, "y": HEX64[1:]})
    put_json("bucket", serialized_named_tensors=[payload([("w", small)])], load_format=None, flush_cache=False, index="7")
    put_json("bucket-protocol-2", serialized_named_tensors=[payload({"w": small}, 2)], load_format="direct")
    put_json("bucket-flattened", serialized_tensors=payload({"flattened_tensor": small, "metadata": []}),
             load_format="flattened_bucket", weight_version="3", timeout_seconds=1e-3)
    put_json("bucket-two-ranks", serialized_named_tensors=["AAAA", "AAAA"], load_format="nccl_m2n")
    put_json("bucket-not-base64", serialized_tensors="A===", serialized_named_tensors=["\n"])
    put("twice", 'j{"a": 1, "a": 2}')
    put_query("query", "lora_name", "a", "config_dict", '{"r": 4}', "flush_cache", "True", "index", "18446744073709551615",
              "timeout_seconds", "1e4")
    put_query("query-twice", "a", "1", "a", "2")
    put_query("query-odd", "lora_name", "a", "pinned")
    put("image", image({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)))
    put("image-empty", image({}))
    put("image-cut", image({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)))
