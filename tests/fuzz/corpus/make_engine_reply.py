#!/usr/bin/env python3
"""Writes the inputs of fuzz_engine_reply: the answers of engines to calls of the update routes, good and odd ones."""

import json
import pathlib

HERE = pathlib.Path(__file__).resolve().parent / "engine_reply"
RECEIPT = {
    "state": "prepared", "session_id": "push-1", "instance": "host-1", "weight_version": "v1", "base_mode": "shadow",
    "ranks": 1, "tensors": 384, "bytes": 31600000, "xxh3": "00112233445566778899aabbccddeeff", "base_tensors": 0,
    "base_bytes": 0, "adapters": [{"name": "a", "id": 3, "tensors": 384, "bytes": 1, "xxh3": "0" * 32}],
    "milliseconds": {"receive": 1.5, "verify": 0.1, "build": 3.25, "publish": 0.02}}

ANSWERS = {
    "success": (0, {"success": True, "message": "Success", "receipt": RECEIPT}),
    "published": (0, {"success": True, "message": "", "receipt": {**RECEIPT, "state": "published"}}),
    "odd_state": (0, {"success": True, "receipt": {**RECEIPT, "state": "asleep"}}),
    "odd_digest": (0, {"success": True, "receipt": {**RECEIPT, "xxh3": "00"}}),
    "long_id": (0, {"success": True, "receipt": {**RECEIPT, "session_id": "s" * 70}}),
    "negative": (0, {"success": True, "receipt": {**RECEIPT, "bytes": -1}}),
    "huge_time": (0, {"success": True, "receipt": {**RECEIPT, "milliseconds": {"build": 1e300}}}),
    "no_object": (0, {"success": True, "receipt": [RECEIPT]}),
    "refused": (1, {"success": False, "message": "[LORA-CHECK] no", "status": "ERR_DIGEST"}),
    "refused_ok": (1, {"success": False, "message": "", "status": "OK"}),
    "error_message": (1, {"success": False, "error_message": "rank 64 is over", "loaded_adapters": {}}),
    "deep_error": (1, {"error": {"message": "deep", "type": "BadRequest", "code": 400}}),
    "detail": (2, {"detail": "Not Found"}),
    "false_with_200": (0, {"success": False, "message": "no"}),
}
TEXTS = {"plain": b"\x04Internal Server Error", "empty": b"\x05", "cut": b'\x00{"success": tr', "zeros": b"\x00\x00\x00"}


def main():
    HERE.mkdir(exist_ok=True)
    for name, (status, answer) in ANSWERS.items():
        (HERE / name).write_bytes(bytes([status]) + json.dumps(answer).encode())
    for name, text in TEXTS.items():
        (HERE / name).write_bytes(text)


if __name__ == "__main__":
    main()
