"""The reader takes and refuses the same files as the pinned safetensors package, which reads what the writer writes.

Runs tests/unit/format/safetensors_tool.
"""

import json
import os
import pathlib
import random
import struct
import subprocess

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/format/safetensors_tool"

# What the package takes and this reader refuses on purpose: a name that stands twice hides a tensor, the format's own text
# wants '{' first, and a view has at most 8 dimensions.
STRICTER = ("duplicate", "does not begin with '{'", "8 dimensions")


def image(header, data=b"", length=None):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def named_cases():
    a = entry("F32", [2], 0, 8)
    return {
        "empty": image("{}"),
        "spaces": image("{}        "),
        "leading-space": image(" {}"),
        "nul-padding": image("{}\0\0\0"),
        "trailing-byte": image("{}", b"x"),
        "no-bytes": b"",
        "seven-bytes": b"\2\0\0\0\0\0\0",
        "length-0": bytes(8),
        "length-over-file": image("{}", length=3),
        "length-2-63": image("{}", length=1 << 63),
        "length-over-limit": image("{}", length=100_000_001),
        "list": image("[]"),
        "unordered": image({"b": entry("U8", [1], 8, 9), "a": a}, bytes(9)),
        "unaligned": image({"x": entry("U8", [3], 0, 3), "y": entry("F32", [1], 3, 7)}, bytes(7)),
        "shared": image({"a": a, "b": a}, bytes(8)),
        "hole": image({"a": a, "b": entry("U8", [1], 9, 10)}, bytes(10)),
        "overlap": image({"a": a, "b": entry("U8", [2], 7, 9)}, bytes(9)),
        "backwards": image({"a": entry("U8", [4], 4, 0)}, bytes(4)),
        "beyond": image({"a": entry("U8", [4], 0, 4)}, bytes(3)),
        "zero": image({"z": entry("F32", [0], 0, 0), "y": entry("F32", [0, 16], 0, 0), "x": entry("F32", [], 0, 4)}, bytes(4)),
        "zero-at-end": image({"a": a, "z": entry("F32", [0], 8, 8)}, bytes(8)),
        "one-without-bytes": image({"a": entry("F32", [1], 0, 0)}),
        "overflow": image({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}),
        "overflow-then-zero": image({"a": entry("U8", [1 << 32, 1 << 32, 0], 0, 0)}),
        "negative": image({"a": entry("U8", [-1], 0, 0)}),
        "fraction": image({"a": entry("U8", [1.5], 0, 1)}, b"x"),
        "unknown-dtype": image({"a": entry("F7", [1], 0, 1)}, b"x"),
        "no-dtype": image({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
        "three-offsets": image({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x"),
        "extra-key": image({"a": a | {"note": 1}}, bytes(8)),
        "metadata": image({"__metadata__": {"k": "v"}, "a": a}, bytes(8)),
        "metadata-null": image({"__metadata__": None, "a": a}, bytes(8)),
        "metadata-number": image({"__metadata__": {"k": 1}, "a": a}, bytes(8)),
        "twice-same-place": image('{"a":%s,"a":%s}' % (json.dumps(a), json.dumps(a)), bytes(8)),
        "twice": image('{"a":%s,"a":%s}' % (json.dumps(entry("U8", [1], 0, 1)), json.dumps(entry("U8", [1], 1, 2))), bytes(2)),
        "nine-dimensions": image({"a": entry("U8", [1] * 9, 0, 1)}, b"x"),
        "bad-utf8": struct.pack("<Q", 4) + b'{"\xff}',
    }


def changed_images(count):
    """Good images with one or two bytes changed, most of them in the header."""
    rng = random.Random(5)
    good = save({"w": torch.zeros(3, 4, dtype=torch.bfloat16), "v": torch.ones(5), "s": torch.tensor(1)}, {"k": "v"})
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            place = rng.randrange(len(data)) if rng.random() < 0.1 else rng.randrange(8, len(data) - 50)
            data[place] = rng.choice(b'0123456789[]{}",: \0FUBI') if rng.random() < 0.8 else rng.randrange(256)
        yield bytes(data)


def theirs(path):
    try:
        with safe_open(path, "pt"):
            return True
    except (SafetensorError, OSError):
        return False


def ours(paths):
    done = subprocess.run([TOOL, "check", *paths], capture_output=True, timeout=60, check=True)
    lines = done.stdout.decode(errors="replace").splitlines()
    assert len(lines) == len(paths)
    return lines


@pytest.mark.parametrize("name", named_cases())
def test_named_cases_are_judged_alike(tmp_path, name):
    path = tmp_path / "x.safetensors"
    path.write_bytes(named_cases()[name])
    line = ours([path])[0]
    assert (line == "ok") == theirs(path) or any(word in line for word in STRICTER), line


def test_changed_images_are_judged_alike(tmp_path):
    paths = []
    for i, data in enumerate(changed_images(2500)):
        paths.append(tmp_path / f"{i}.safetensors")
        paths[-1].write_bytes(data)
    lines = ours(paths)
    accepted = [theirs(path) for path in paths]
    assert 50 < sum(accepted) < len(paths) - 50  # both kinds are there
    for path, line, taken in zip(paths, lines, accepted, strict=True):
        assert (line == "ok") == taken or any(word in line for word in STRICTER), (path.read_bytes(), line, taken)


def test_the_package_reads_what_is_written(tmp_path):
    tensors = {"odd": torch.arange(3, dtype=torch.uint8), "w": torch.randn(7, 32).bfloat16(), "half": torch.randn(5).half(),
               "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "big": torch.randn(64, 16), "é\"": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "in")
    subprocess.run([TOOL, "copy", tmp_path / "in", tmp_path / "out"], check=True, timeout=60)
    copied = load_file(tmp_path / "out")
    assert copied.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert copied[name].dtype == tensor.dtype and torch.equal(copied[name], tensor), name
