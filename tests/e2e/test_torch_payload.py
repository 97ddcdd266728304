"""The payload reader gives torch's own bytes for every form that torch and its users write, runs nothing, and leaves
shared memory as one reader of torch's own would; Python and torch read what the writer writes.

Runs tests/unit/format/torch_tool.
"""

import base64
import collections
import dataclasses
import gc
import hashlib
import io
import os
import pathlib
import pickle
import pickletools
import random
import subprocess
import sys
import types
import zipfile

import pytest
import torch
import torch.multiprocessing
from multiprocessing.reduction import ForkingPickler
from safetensors.torch import save_file

from tests.e2e.trainer_forms import sharing

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/format/torch_tool"
DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64]
BUCKET_MODULES = ["sglang.srt.weight_sync.tensor_bucket", "sglang.srt.model_executor.model_runner", "trainer.buckets"]


def raw(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1).view(torch.uint8).numpy().tobytes()


def line(name, tensor):
    shape = "[" + ", ".join(map(str, tensor.shape)) + "]"
    return "\t".join((name, str(tensor.dtype).removeprefix("torch."), shape, hashlib.sha256(raw(tensor)).hexdigest()))


def lines(tensors):
    return [line(name, tensor) for name, tensor in (tensors.items() if hasattr(tensors, "items") else tensors)]


ABANDONED = set()


class Reader:
    def __init__(self, folder):
        self.folder = folder

    def run(self, payload, *options):
        path = self.folder / "payload"
        path.write_bytes(payload)
        done = subprocess.run([TOOL, "read", *options, path], capture_output=True, timeout=60)
        assert done.returncode in (0, 1) and not done.stderr, done.stderr.decode()
        return done.stdout.decode(errors="replace").splitlines()

    def refused(self, payload, *options):
        came = self.run(payload, *options)
        assert len(came) == 1 and came[0].startswith("refused "), came
        return came[0]


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


def views():
    base = torch.randn(6, 8)
    layer = torch.nn.Linear(3, 5)
    layer.weight.loaded_by = "a name"
    noted = torch.ones(3)
    noted.note = {"k": 1}
    tensors = {"whole": base, "row": base[2], "rows": base[1:4], "columns": base[:, 2:5], "steps": base[1::2, ::3],
               "transposed": base.t(), "scalar": torch.tensor(2.5), "element": base[3, 3], "empty": torch.zeros(0, 3),
               "empty view": base[:, 8:], "expanded": base[:1].expand(4, 8), "one": base[:1, :1], "three": torch.randn(2, 3, 4)
               .permute(2, 0, 1), "parameter": torch.nn.Parameter(base[1:3]), "frozen": torch.nn.Parameter(base[0], False), "buffer": torch.nn.Buffer(base[4]),
               "parameter with attributes": layer.weight, "noted": noted, "bytes": base.bfloat16().view(torch.uint8)[:, 3:9],
               "é/\u4e2d": torch.ones(2), "eight": torch.randn(1, 2, 1, 2, 1, 2, 1, 2)}
    for dtype in DTYPES:
        tensors[str(dtype)] = torch.arange(7).to(dtype)
    return tensors


def random_views(count):
    rng = random.Random(3)
    flat = torch.arange(600, dtype=torch.int32)
    for i in range(count):
        shape = [rng.choice((0, 1, 1, 2, 3, 4)) if rng.random() < 0.3 else rng.randint(1, 4) for _ in range(rng.randint(0, 5))]
        stride = [rng.choice((0, 1, 2, 3, 5, 24)) for _ in shape]
        yield f"t{i}", flat.as_strided(shape, stride, rng.randint(0, 20))


# --- plain pickles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_pickles_of_every_protocol_and_container(reader, protocol):
    tensors = views()
    wanted = lines(tensors)
    containers = [tensors, collections.OrderedDict(tensors), list(tensors.items()), tuple(tensors.items()),
                  [list(pair) for pair in tensors.items()]]
    for container in containers:
        assert reader.run(pickle.dumps(container, protocol=protocol)) == wanted
        assert reader.run(pickle._dumps(container, protocol=protocol)) == wanted  # Python's own pickler
        assert reader.run(pickletools.optimize(pickle.dumps(container, protocol=protocol))) == wanted


def test_random_strided_views(reader):
    tensors = dict(random_views(400))
    assert reader.run(pickle.dumps(tensors)) == lines(tensors)


def test_more_tensors_than_a_pickler_batches(reader):
    tensors = {f"layers.{i}.w": torch.full((2,), float(i)) for i in range(2500)}
    assert reader.run(pickle.dumps(tensors)) == lines(tensors)
    assert reader.run(pickle.dumps(list(tensors.items()))) == lines(tensors)


def test_state_dict_of_a_module(reader):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    state = module.state_dict()
    for protocol in (2, 4, 5):
        assert reader.run(pickle.dumps(state, protocol=protocol)) == lines(state)


def test_shared_storage_and_tied_tensors(reader):
    base = torch.randn(50)
    tensors = {"a": base[:20], "b": base[10:], "tied": base, "tied too": base}
    assert reader.run(pickle.dumps(tensors)) == lines(tensors)


def test_protocol_5_bytearray_in_band(reader):
    """A storage whose bytes come as BYTEARRAY8 instead of BINBYTES."""

    class Storage:
        def __reduce__(self):
            stream = io.BytesIO()
            torch.save(torch.arange(3.0).untyped_storage(), stream, _use_new_zipfile_serialization=False)
            return torch.storage._load_from_bytes, (bytearray(stream.getvalue()),)

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v3, (Storage(), 0, (3,), (1,), False, collections.OrderedDict(), torch.float32)

    for protocol in (2, 4, 5):
        assert reader.run(pickle.dumps([("w", Tensor())], protocol=protocol)) == [line("w", torch.arange(3.0))]


@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_torch_save(reader, zipped):
    tensors = {name: tensor for name, tensor in views().items() if name != "bytes"}  # the legacy form refuses a second dtype
    for protocol in (2, 4, 5):
        stream = io.BytesIO()
        torch.save(tensors, stream, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
        assert reader.run(stream.getvalue()) == lines(tensors)


def test_long_zip_archives(reader, monkeypatch):
    """The records that sizes from 4 GiB on need, written at small ones; torch reads them as well."""
    stream, again = io.BytesIO(), io.BytesIO()
    tensors = {"w": torch.arange(300.0), "v": torch.ones(3, 3).bfloat16()}
    torch.save(tensors, stream)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(again, "w") as target:
        for name in source.namelist():
            target.writestr(zipfile.ZipInfo(name), source.read(name))
    assert b"PK\6\6" in again.getvalue()
    again.seek(0)
    assert lines(torch.load(again)) == lines(tensors)
    assert reader.run(again.getvalue()) == lines(tensors)


def test_compressed_zip_archives_are_refused(reader):
    stream, again = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(1000)}, stream)
    with zipfile.ZipFile(stream) as source, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert "compressed" in reader.refused(again.getvalue())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint16])
def test_zip_archive_inside_a_pickled_storage(reader, dtype):
    tensor = torch.arange(12).to(dtype)

    class Storage:
        def __reduce__(self):
            stream = io.BytesIO()
            torch.save(tensor.untyped_storage(), stream)
            return torch.storage._load_from_bytes, (stream.getvalue(),)

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v3, (Storage(), 2, (2, 3), (3, 1), False, collections.OrderedDict(), dtype)

    assert reader.run(pickle.dumps({"w": Tensor()})) == [line("w", tensor[2:8].reshape(2, 3))]


def test_big_endian_is_refused(reader):
    payload = pickle.dumps({"w": torch.ones(3)})
    order = payload.index(b"little_endian") + len(b"little_endian")
    at = payload.index(b"\x88", order)
    assert "big-endian" in reader.refused(payload[:at] + b"\x89" + payload[at + 1:])
    stream = io.BytesIO()
    torch.save({"w": torch.ones(3)}, stream)
    archive = stream.getvalue()
    assert "big-endian" in reader.refused(archive.replace(b"little", b"bigbig"))


@pytest.mark.parametrize(("payload", "words"), [
    ({"w": torch.ones(2, dtype=torch.complex64)}, "ComplexFloatStorage"),
    ({"w": torch.ones(3).to_sparse()}, "_rebuild_sparse_tensor"),
    ({"w": torch.ones(3, device="meta")}, "_rebuild_meta_tensor_no_storage"),
    ({"w": torch.zeros(3, dtype=torch.float8_e5m2fnuz)}, "float8_e5m2fnuz"),
    ({"w": 3}, "an int stands where a tensor was wanted"),
    ({3: torch.ones(2)}, "the name of a tensor is an int"),
    ({"": torch.ones(2)}, "wanted 1 to 4096"),
    ({"a\0b": torch.ones(2)}, "NUL"),
    ([("w", torch.ones(2)), ("w", torch.zeros(2))], "tensor name w is given twice"),
    ([("w", torch.ones(2), 1)], "entry 0"),
    ([torch.ones(2)], "entry 0"),
    (torch.ones(2), "a list of (name, tensor) pairs or a dict"),
    ({"flattened_tensor": torch.ones(2), "metadata": []}, "load_format"),
    ({"w": torch.ones([1] * 9)}, "9 dimensions"),
    ({"w": {1, 2}}, "EMPTY_SET"),
])
def test_what_is_no_payload_of_weights_is_refused_by_name(reader, payload, words):
    assert words in reader.refused(pickle.dumps(payload, protocol=4))


def test_empty_payloads(reader):
    assert reader.run(pickle.dumps([])) == []
    assert reader.run(pickle.dumps({})) == []


def test_pickles_cut_anywhere_are_refused(reader, tmp_path):
    payload = pickle.dumps([("a", torch.arange(5).bfloat16()), ("b", torch.ones(2, 2).t())])
    paths = []
    for n in range(len(payload)):
        paths.append(tmp_path / f"cut-{n}")
        paths[-1].write_bytes(payload[:n])
    done = subprocess.run([TOOL, "read", *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout.count("refused ERR_") == len(paths), done.stdout


# --- nothing is run ---------------------------------------------------------------------------------------------------


def by_name(module, name, arguments, protocol=4):
    """A pickle that calls module.name(*arguments), whether or not there is such a thing here."""
    inner = pickle.dumps(arguments, protocol=protocol)[2:-1]
    if protocol >= 4:
        inner = pickletools.optimize(pickle.dumps(arguments, protocol=protocol))
        inner = inner[2:-1] if inner[2] != 0x95 else inner[11:-1]
        head = b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    else:
        head = f"c{module}\n{name}\n".encode()
    return bytes([0x80, protocol]) + head + inner + b"R."


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("module", "name"), [
    ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"),
    ("__builtin__", "eval"), ("subprocess", "Popen"), ("subprocess", "run"), ("codecs", "decode"), ("torch", "load"),
    ("torch.hub", "load"), ("torch.storage", "os.system"), ("types", "CodeType"), ("importlib", "import_module"),
    ("torch._utils", "_rebuild_tensor"), ("functools", "partial"), ("operator", "attrgetter"), ("torch", "os.system"),
])
def test_hostile_calls_are_refused_and_not_run(reader, tmp_path, module, name, protocol):
    mark = tmp_path / "was-run"
    said = reader.refused(by_name(module, name, (f"touch {mark}",), protocol))
    assert "ERR_UNSUPPORTED" in said and f"{module}.{name}" in said and "nothing of it was run" in said
    assert not mark.exists()


def test_the_hostile_payload_would_run_in_python(tmp_path):
    """So that the test above tests something."""
    mark = tmp_path / "was-run"
    pickle.loads(by_name("os", "system", (f"touch {mark}",)))
    assert mark.exists()


def test_hostile_call_hidden_in_a_storage_or_a_value(reader, tmp_path):
    mark = tmp_path / "was-run"
    evil = by_name("os", "system", (f"touch {mark}",), 2)
    good = pickle.dumps({"w": torch.ones(3)})
    place = good.index(b"\x80\x02(X\x07\x00\x00\x00storage")
    storage = next(value for _, value, _ in pickletools.genops(good) if isinstance(value, bytes))
    inside = storage[:place - good.index(storage)] + evil
    assert "os.system" in reader.refused(by_name("torch.storage", "_load_from_bytes", (inside,)))
    assert "os.system" in reader.refused(pickle.dumps([("w", local_class(BUCKET_MODULES[1])([evil]))]))
    assert not mark.exists()


SANITIZED = b"__asan_init" in TOOL.read_bytes() if TOOL.exists() else False


def cost_of(payload, folder, *options):
    """Output of the reader, the most memory it held in MiB, its processor seconds."""
    path = folder / "bomb"
    path.write_bytes(payload)
    child = ("import resource, subprocess, sys; d = subprocess.run(sys.argv[1:], capture_output=True, text=True); "
             "u = resource.getrusage(resource.RUSAGE_CHILDREN); print(u.ru_maxrss, u.ru_utime + u.ru_stime); print(d.stdout, end='')")
    done = subprocess.run([sys.executable, "-c", child, TOOL, "read", *options, path], capture_output=True, text=True, timeout=60)
    first, _, rest = done.stdout.partition("\n")
    kib, seconds = map(float, first.split())
    return rest, kib / 1024, seconds


def chain_of_tuples(n):
    """Each tuple holds the one before it twice, so that walking it would take 2^n steps."""
    links = b"".join(b"(j" + i.to_bytes(4, "little") + b"j" + i.to_bytes(4, "little") + b"t\x94" for i in range(n))
    return b"\x80\x04]\x94" + links + b"."


TENSOR = pickle.dumps(torch.ones(1), protocol=4)[11:-1]
BOMBS = {
    "marks": lambda: b"\x80\x04" + b"(" * 1_000_000,
    "lists": lambda: b"\x80\x04" + b"]" * 30_000_000,
    "tuples": lambda: b"\x80\x04N" + b"\x85" * 40_000_000,
    "long": lambda: b"\x80\x04\x8b\xff\xff\xff\x7f" + bytes(100),
    "frame": lambda: b"\x80\x04\x95" + b"\xff" * 8,
    "bytes": lambda: b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
    "text": lambda: b"\x80\x04X\xff\xff\xff\xff",
    "memo": lambda: b"\x80\x04Nr\xff\xff\xff\xff.",
    "memo read": lambda: b"\x80\x04]\x94" + b"h\x00" * 40_000_000,
    "tensors": lambda: b"\x80\x04" + TENSOR[:-2] + b"h\x02h\x0fR" * 3_000_000,
    "calls": lambda: b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93\x94" + b"h\x00)R" * 17_000_000,
    "expanded": lambda: pickle.dumps({"w": torch.ones(1).expand(1 << 20, 1 << 20)}),
    "many expanded": lambda: pickle.dumps({f"w{i}": torch.ones(1).expand(1 << 10, 1 << 10) for i in range(64)}),
    "one name": lambda: (b"\x80\x04](X\x00\x10\x00\x00" + b"n" * 4096 + b"\x94" + TENSOR + b"\x86"
                         + b"h\x00h\x11\x86" * 1_000_000 + b"e."),
    "doubling": lambda: chain_of_tuples(100_000),
    "archive in archive": lambda: pickle.dumps({"w": nested_archives(6)}),
}


def nested_archives(depth):
    class Inner:
        def __init__(self, bytes_):
            self.bytes = bytes_

        def __reduce__(self):
            return torch.storage._load_from_bytes, (self.bytes,)

    value = torch.ones(1).untyped_storage()
    for _ in range(depth):
        stream = io.BytesIO()
        torch.save(value, stream, _use_new_zipfile_serialization=False, pickle_protocol=4)
        value = Inner(stream.getvalue())
    return value


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_quickly_in_little_memory(tmp_path, name):
    payload = BOMBS[name]()
    said, mib, seconds = cost_of(payload, tmp_path, "-m", str(32 << 20))
    assert said.startswith("refused "), said
    assert SANITIZED or (seconds < 3 and mib < len(payload) / 2**20 + 400), (seconds, mib)


# --- shared memory ----------------------------------------------------------------------------------------------------


def shared_names():
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def shared_objects():
    """Count of each object of this process in /dev/shm, without those of payloads that other tests never had read."""
    mine = [name for name in shared_names() if name not in ABANDONED]
    return {name: int.from_bytes(pathlib.Path("/dev/shm", name).read_bytes()[:4], "little") for name in mine}


def fork_pickle(value):
    return bytes(ForkingPickler.dumps(value))


@pytest.fixture
def file_system():
    gc.collect()
    ABANDONED.update(shared_names())
    with sharing("file_system"):
        yield
    gc.collect()
    assert shared_objects() == {}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_file_system_form(reader, file_system, protocol):
    tensors = views()
    stream = io.BytesIO()
    ForkingPickler(stream, protocol).dump(list(tensors.items()))
    assert reader.run(stream.getvalue()) == lines(tensors)
    assert set(shared_objects().values()) == {1}  # only the producer's own
    del tensors


def test_count_is_taken_once_per_payload(reader, file_system):
    tensor = torch.arange(100, dtype=torch.float32)
    tensors = {"a": tensor, "b": tensor[10:20], "c": tensor.view(torch.int32)}
    wanted = lines(tensors)
    payloads = [fork_pickle(tensors) for _ in range(3)]
    assert list(shared_objects().values()) == [4]
    for left, payload in zip((3, 2, 1), payloads):
        assert reader.run(payload) == wanted
        assert list(shared_objects().values()) == [left]
    del tensor, tensors


def test_count_is_what_torch_itself_gives_back(file_system):
    """The rule, by torch: one reading takes one payload's count and no more."""
    tensor = torch.arange(100.0)
    payload = fork_pickle({"a": tensor, "b": tensor[1:]})
    assert list(shared_objects().values()) == [2]
    child = "import pickle, sys; x = pickle.load(open(sys.argv[1], 'rb')); assert x['b'][0] == 1; del x"
    path = pathlib.Path("/dev/shm") / f"hr-test-payload-{os.getpid()}"
    path.write_bytes(payload)
    try:
        subprocess.run([sys.executable, "-c", child, path], check=True, timeout=60)
    finally:
        path.unlink()
    assert list(shared_objects().values()) == [1]
    del tensor


def test_several_ranks_read_one_payload(reader, file_system):
    tensor = torch.arange(100.0)
    payload = fork_pickle([("w", tensor)])
    for _ in range(3):
        assert reader.run(payload, "-k") == [line("w", tensor)]
        assert list(shared_objects().values()) == [2]
    assert reader.run(payload) == [line("w", tensor)]
    assert list(shared_objects().values()) == [1]
    del tensor


def test_reading_twice_without_keeping_takes_the_producers_count(reader, file_system):
    """Why keep_shared is there: the fault of torch's own readers, four of one payload."""
    tensor = torch.arange(100.0)
    payload = fork_pickle([("w", tensor)])
    reader.run(payload)
    reader.run(payload)
    assert shared_objects() == {}
    said = reader.refused(payload)
    assert "ERR_NOT_FOUND" in said and "gone" in said and "inline" in said and "/torch_" in said
    del tensor


def test_last_reader_removes_what_its_producer_let_go(reader, file_system):
    tensor = torch.arange(100.0)
    wanted = [line("w", tensor)]
    payload = fork_pickle([("w", tensor)])
    del tensor
    gc.collect()
    assert list(shared_objects().values()) == [1]
    assert reader.run(payload) == wanted
    assert shared_objects() == {}


def test_shared_memory_stays_flat_over_1000_payloads(tmp_path, file_system):
    for _ in range(20):
        paths = []
        for i in range(50):
            paths.append(tmp_path / f"payload-{i}")
            paths[-1].write_bytes(fork_pickle([("a", torch.full((100,), float(i))), ("b", torch.zeros(0))]))
        gc.collect()
        done = subprocess.run([TOOL, "read", *paths], capture_output=True, timeout=60)
        assert done.returncode == 0 and b"refused" not in done.stdout
        assert shared_objects() == {}


def test_a_refused_payload_gives_back_what_it_named(reader, file_system):
    tensor = torch.arange(10.0)
    reader.refused(fork_pickle([("w", tensor), ("w", tensor)]))
    assert list(shared_objects().values()) == [1]
    del tensor


@pytest.mark.parametrize("name", [b"/etc/passwd", b"/torch_1/../../etc/passwd", b"torch_1", b"/torch_", b"/torch_1\0", b"/sem.x",
                                  b"/torch_" + b"1" * 200, b"/torch_../x"])
def test_names_that_are_not_torchs_are_not_opened(reader, name):
    storage = by_name("torch.multiprocessing.reductions", "rebuild_storage_filename",
                      (torch.storage.UntypedStorage, b"/tmp/manager.sock", name, 8))
    assert "not torch's" in reader.refused(storage)


def test_an_object_smaller_than_the_payload_says_is_refused(reader, file_system):
    tensor = torch.arange(10.0)
    payload = fork_pickle([("w", tensor)])
    place = payload.index(b"K\x28", payload.index(b"/torch_"))  # 40 bytes
    said = reader.refused(payload[:place + 1] + b"\x29" + payload[place + 2:])
    assert "104 bytes" in said and "41" in said
    assert reader.run(payload) == [line("w", tensor)]
    del tensor


def test_file_descriptor_form_is_refused_at_once(reader):
    with sharing("file_descriptor"):
        said = reader.refused(fork_pickle([("w", torch.ones(3))]))
    assert "ERR_UNSUPPORTED" in said and "file_descriptor" in said and "plain pickle" in said


@pytest.mark.parametrize(("module", "name"), [
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"),
])
def test_cuda_forms_are_refused_at_once(reader, module, name):
    arguments = (torch.Tensor, torch.Size([2]), (1,), 0, torch.storage.UntypedStorage, torch.bfloat16, "GPU-1234", b"x" * 66, 4,
                 0, False, b"/torch_1_2_3", 0, b"e" * 64, True)
    said = reader.refused(by_name(module, name, arguments))
    assert "ERR_UNSUPPORTED" in said and "CUDA" in said and "CPU tensors" in said and name in said


# --- buckets and values for ranks -------------------------------------------------------------------------------------


def fake_class(module, name, fields):
    """A data class of that name in a module of that name, so that pickle finds it."""
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        sys.modules.setdefault(path, types.ModuleType(path))
    made = dataclasses.make_dataclass(name, fields)
    made.__module__ = module
    setattr(sys.modules[module], name, made)
    return made


@pytest.fixture(autouse=True)
def no_fake_modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("sglang", "trainer"):
            del sys.modules[name]


def metadata_class(module):
    return fake_class(module, "FlattenedTensorMetadata", ["name", "shape", "dtype", "start_idx", "end_idx", "numel"])


def local_class(module):
    return fake_class(module, "LocalSerializedTensor", ["values"])


def new_bucket(tensors, module=BUCKET_MODULES[0]):
    cls, parts, entries, at = metadata_class(module), [], [], 0
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts.append(flat)
        entries.append(cls(name, tensor.shape, tensor.dtype, at, at + flat.numel(), flat.numel()))
        at += flat.numel()
    return {"flattened_tensor": torch.cat(parts), "metadata": entries}


def old_bucket(tensors, module=BUCKET_MODULES[0]):
    cls, entries, at = metadata_class(module), [], 0
    for name, tensor in tensors.items():
        entries.append(cls(name, tensor.shape, tensor.dtype, at, at + tensor.numel(), tensor.numel()))
        at += tensor.numel()
    return {"flattened_tensor": torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), "metadata": entries}


@pytest.mark.parametrize("module", BUCKET_MODULES)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_flattened_buckets_old_and_new(reader, module, protocol):
    mixed = views()
    assert reader.run(pickle.dumps(new_bucket(mixed, module), protocol=protocol), "-f") == lines(mixed)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        one = {"a": torch.arange(6).to(dtype).reshape(2, 3), "b": torch.arange(5).to(dtype), "s": torch.tensor(1).to(dtype)}
        assert reader.run(pickle.dumps(old_bucket(one, module), protocol=protocol), "-f") == lines(one)


def test_flattened_bucket_by_shared_memory(reader, file_system):
    tensors = {"a": torch.randn(5).bfloat16(), "b": torch.randn(3, 3)}
    assert reader.run(fork_pickle(new_bucket(tensors)), "-f") == lines(tensors)


def change(bucket, index, **fields):
    for key, value in fields.items():
        setattr(bucket["metadata"][index], key, value)
    return bucket


@pytest.mark.parametrize(("fields", "words"), [
    ({"start_idx": 0, "end_idx": 12}, "overlap"),
    ({"start_idx": 9, "end_idx": 21}, "overlap"),
    ({"start_idx": 20, "end_idx": 32}, "ends at 32"),
    ({"start_idx": 1 << 62, "end_idx": (1 << 62) + 12}, "ends at"),
    ({"end_idx": 23}, "does not hold"),
    ({"start_idx": 22, "end_idx": 10}, "does not hold"),
    ({"shape": torch.Size([4])}, "does not fill"),
    ({"shape": torch.Size([1 << 40, 1 << 40])}, "does not fill"),
    ({"dtype": torch.float64}, "does not fill"),
    ({"dtype": torch.complex64}, "complex64"),
    ({"numel": None}, "numel (ints)"),
    ({"start_idx": -1}, "numel (ints)"),
    ({"name": "a"}, "given twice"),
])
def test_bad_buckets_are_refused(reader, fields, words):
    tensors = {"a": torch.ones(5, dtype=torch.bfloat16), "b": torch.ones(3)}
    bucket = change(new_bucket(tensors), 1, **fields)
    assert words in reader.refused(pickle.dumps(bucket), "-f")


def as_dicts(bucket):
    return {**bucket, "metadata": [dict(vars(entry), shape=tuple(entry.shape)) for entry in bucket["metadata"]]}


def test_metadata_of_a_bucket_may_be_dicts(reader):
    """Of the same fields, so that a trainer needs no class of SGLang's; what is wrong with them is found alike."""
    tensors = views()
    assert reader.run(pickle.dumps(as_dicts(new_bucket(tensors))), "-f") == lines(tensors)
    same = {"a": torch.ones(4), "b": torch.ones(2, 3)}
    assert reader.run(pickle.dumps(as_dicts(old_bucket(same))), "-f") == lines(same)
    bad = as_dicts(new_bucket(same))
    cut = {**bad, "metadata": [{**bad["metadata"][0], "end_idx": 3}]}
    assert "does not hold" in reader.refused(pickle.dumps(cut), "-f")
    del bad["metadata"][1]["dtype"]
    assert "dtype (torch.dtype)" in reader.refused(pickle.dumps(bad), "-f")
    assert "a dict of its fields" in reader.refused(pickle.dumps({**bad, "metadata": [7]}), "-f")


def test_old_bucket_of_another_dtype_is_refused(reader):
    bucket = change(old_bucket({"a": torch.ones(4), "b": torch.ones(2)}), 1, dtype=torch.int32)
    assert "b is int32 in a flattened bucket of float32" in reader.refused(pickle.dumps(bucket), "-f")


def test_named_tensors_where_a_bucket_was_wanted(reader):
    assert "flattened bucket is a dict" in reader.refused(pickle.dumps({"w": torch.ones(2)}), "-f")


@pytest.mark.parametrize("module", BUCKET_MODULES[1:])
def test_local_serialized_tensor_gives_each_rank_its_value(reader, module):
    cls = local_class(module)
    ranks = [{"a": torch.full((3,), float(r)), "b": torch.arange(6).reshape(2, 3).t() * r} for r in range(4)]
    payload = pickle.dumps([(name, cls([pickle.dumps(tensors[name]) for tensors in ranks])) for name in ("a", "b")])
    for r in range(4):
        assert reader.run(payload, "-r", str(r)) == lines(ranks[r])
    assert "none for rank 4" in reader.refused(payload, "-r", "4")


def test_local_serialized_tensor_in_shared_memory(reader, file_system):
    """Each rank gives back the count of its own value; keep_shared concerns only what all ranks read."""
    cls = local_class(BUCKET_MODULES[1])
    tensor, common = torch.arange(10.0), torch.ones(3)
    payload = fork_pickle([("w", cls([fork_pickle(tensor) for _ in range(3)])), ("c", common)])
    assert sorted(shared_objects().values()) == [2, 4]
    for r, options, left in ((0, ["-k"], [2, 3]), (1, ["-k"], [2, 2]), (2, [], [1, 1])):
        assert reader.run(payload, "-r", str(r), *options) == [line("w", tensor), line("c", common)]
        assert sorted(shared_objects().values()) == left
    del tensor, common


# --- the writer -------------------------------------------------------------------------------------------------------


class Restricted(pickle.Unpickler):
    """As strict as a receiver may be: only the modules a payload needs."""

    def find_class(self, module, name):
        assert module in ("torch", "torch._utils", "torch.storage", "collections", BUCKET_MODULES[0]), (module, name)
        return super().find_class(module, name)


def written(tmp_path, tensors, form):
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, tmp_path / "in")
    subprocess.run([TOOL, "write", form, tmp_path / "in", tmp_path / "out"], check=True, timeout=60)
    subprocess.run([TOOL, "encode", tmp_path / "out", tmp_path / "text"], check=True, timeout=60)
    text = (tmp_path / "text").read_bytes()
    payload = base64.b64decode(text, validate=True)
    assert payload == (tmp_path / "out").read_bytes()
    return payload


def loaded(payload, form):
    value = Restricted(io.BytesIO(payload)).load()
    if form != "flattened":
        return dict(value)
    flat = value["flattened_tensor"]
    assert flat.dtype == torch.uint8 and flat.dim() == 1
    assert all(isinstance(entry.shape, torch.Size) and entry.numel == entry.end_idx - entry.start_idx for entry in value["metadata"])
    return {entry.name: flat[entry.start_idx:entry.end_idx].clone().view(entry.dtype).reshape(entry.shape)
            for entry in value["metadata"]}


def check_self_contained(payload, tensors):
    """What seed tests of an inlined payload ask for."""
    assert len(payload) >= sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert b"/torch_" not in payload


@pytest.mark.parametrize("form", ["pairs", "dict", "flattened"])
def test_python_and_torch_read_what_is_written(tmp_path, reader, form):
    metadata_class(BUCKET_MODULES[0])
    tensors = {name: tensor for name, tensor in views().items() if tensor.dtype != torch.bool} | {"flag": torch.tensor([True, False])}
    payload = written(tmp_path, tensors, form)
    back = loaded(payload, form)
    assert sorted(lines(back)) == sorted(lines(tensors))
    check_self_contained(payload, tensors)
    assert sorted(reader.run(payload, *(["-f"] if form == "flattened" else []))) == sorted(lines(tensors))


def test_written_tensors_are_like_torchs_own(tmp_path):
    """Not only equal bytes: leaf tensors, row-major, own storage of the right size."""
    tensors = {"a": torch.randn(3, 4), "z": torch.zeros(2, 0, 3)}
    for name, tensor in loaded(written(tmp_path, tensors, "pairs"), "pairs").items():
        assert tensor.is_contiguous() and not tensor.requires_grad and tensor.stride() == tensors[name].stride()
        assert tensor.untyped_storage().nbytes() == tensors[name].untyped_storage().nbytes()


def test_the_shared_memory_form_in_its_place_fails(file_system):
    """The check above is one that a payload of references cannot pass."""
    tensors = {"w": torch.zeros(256, 1024, dtype=torch.bfloat16)}
    check_self_contained(pickle.dumps(list(tensors.items())), tensors)
    reference = fork_pickle(list(tensors.items()))
    assert len(reference) < 1024 and b"/torch_" in reference
    with pytest.raises(AssertionError):
        check_self_contained(reference, tensors)
    with pytest.raises(AssertionError):
        assert b"/torch_" not in reference
    pickle.loads(reference)  # gives the count back
    del tensors


# --- base64 -----------------------------------------------------------------------------------------------------------


def test_base64_is_pythons(tmp_path):
    rng = random.Random(1)
    for n in [0, 1, 2, 3, 4, 5, 47, 48, 49, 95, 96, 97, 3071, 3072, 3073, 100_001]:
        data = rng.randbytes(n)
        (tmp_path / "in").write_bytes(data)
        subprocess.run([TOOL, "encode", tmp_path / "in", tmp_path / "text"], check=True, timeout=60)
        assert (tmp_path / "text").read_bytes() == base64.b64encode(data)
        subprocess.run([TOOL, "decode", tmp_path / "text", tmp_path / "out"], check=True, timeout=60)
        assert (tmp_path / "out").read_bytes() == data
