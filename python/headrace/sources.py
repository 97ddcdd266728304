"""What can be pushed, turned into named regions of host memory: PEFT models, dicts of tensors, directories.

A contiguous tensor in host memory is sent from where it lies. Others are copied, and files are read, when their turn
comes, and the copy is freed as soon as it has left. torch is not imported before a tensor shows up.
"""

from __future__ import annotations

import array
import bisect
import ctypes
import dataclasses
import itertools
import json
import operator
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union

from headrace import _library

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Source = Union["torch.nn.Module", Tensors, str, "os.PathLike[str]"]
Config = Union[Mapping[str, Any], str, "os.PathLike[str]", Any]

# Tensors that are handed to the library in one call; copies among them live that long.
MOST_UNIT_BYTES = 16 << 20
PEFT_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One adapter of a push, where its source alone does not say all.

    Attributes:
        source: a PEFT model, a dict of tensors under PEFT's names, or a directory that PEFT has written.
        config: a LoraConfig, the fields of an adapter_config.json, or such a file. Needed with a dict of tensors; a
            model and a directory bring their own.
        pinned: the engine does not evict it.
        peft_adapter: which adapter of a PEFT model; None: the active one, of which there must be one then.
    """

    source: Source
    config: Config | None = None
    pinned: bool = False
    peft_adapter: str | None = None


class _File:
    """A safetensors file that stays open, and is noticed when its writer changes it meanwhile."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._before = self._state()

    def _state(self) -> tuple[int, int]:
        now = os.fstat(self._file.fileno())
        return now.st_size, now.st_mtime_ns

    @property
    def size(self) -> int:
        return self._before[0]

    def read(self, offset: int, nbytes: int) -> bytearray:
        buffer, done = bytearray(nbytes), 0
        while done < nbytes:
            n = os.preadv(self._file.fileno(), [memoryview(buffer)[done:]], offset + done)
            if n == 0:
                raise ValueError(f"{self.path}: cut short while it was read; push a directory that nobody writes to")
            done += n
        if self._state() != self._before:
            raise ValueError(f"{self.path}: written to while it was read; push a directory that nobody writes to")
        return buffer


@dataclasses.dataclass(frozen=True)
class Region:
    """Elements of a file. They are read when their turn comes; a mapping would be pulled away under the push by a
    trainer that saves over it."""

    file: _File
    offset: int
    dtype: int
    shape: tuple[int, ...]
    nbytes: int

    def read(self) -> bytearray:
        return self.file.read(self.offset, self.nbytes)


# ---- directories ----

def _list_safetensors(path: pathlib.Path) -> Iterator[tuple[str, Region]]:
    file = _File(path)
    if file.size < 8:
        raise ValueError(f"{path}: {file.size} bytes are not a safetensors file")
    header_size = int.from_bytes(file.read(0, 8), "little")
    if header_size > file.size - 8:
        raise ValueError(f"{path}: the header is said to have {header_size} bytes, the file has {file.size}")
    header = json.loads(file.read(8, header_size))
    start = 8 + header_size
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in _library.SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}, which is not known here")
        if not 0 <= begin <= end <= file.size - start:
            raise ValueError(f"{path}: {name} lies outside the file")
        yield name, Region(file, start + begin, _library.SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]),
                           end - begin)


def _read_directory(path: pathlib.Path, weights: str) -> dict[str, Region]:
    """Tensors of a directory: those of its index if it has one, else of the one file."""
    index, single = path / f"{weights}.safetensors.index.json", path / f"{weights}.safetensors"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif single.exists():
        files = [single.name]
    else:
        raise FileNotFoundError(f"{path}: neither {single.name} nor {index.name} is there")
    return {name: region for file in files for name, region in _list_safetensors(path / file)}


# ---- models ----

def _is_module(source: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


# What torch.compile, activation checkpointing, FSDP and DDP call the model that they are put around, or a part of it.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")
_WRAPPED = re.compile(r"\.(?:(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.)+")


def unwrap(model: Any) -> Any:
    """The model inside its wrappers, which may lie around each other. They are known by what they hold: some pass every
    attribute of the model on."""
    while (name := next((name for name in WRAPPERS if name in model._modules), None)) is not None:
        model = model._modules[name]
    return model


def _plain_name(name: str) -> str:
    """Without the wrappers of parts of the model."""
    return _WRAPPED.sub(".", name)


def _refuse_merged(model: Any) -> None:
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            raise ValueError(f"the adapter {module.merged_adapters[0]!r} is merged into the base weights of {name}: "
                             "they would be applied twice. Call unmerge_adapter() before the push")


MERGED = "after merge_and_unload() a LoRA is part of the base weights: push before merging, or push it with base="


def _active_adapter(model: Any) -> str:
    """Layers add up all that are active; one push publishes one under a name."""
    active: list[str] = model.active_adapters
    if len(active) != 1:
        raise ValueError(f"{len(active)} adapters of the model are active ({sorted(active)}; it has "
                         f"{sorted(model.peft_config)}), and one is pushed under a name: say which with peft_adapter=, "
                         "in a push as Adapter(model, peft_adapter='...')")
    return active[0]


def _peft_adapter(model: Any, adapter: str | None) -> tuple[Tensors, Any]:
    from peft import get_peft_model_state_dict

    active = adapter or _active_adapter(model)
    if active not in model.peft_config:
        raise ValueError(f"the model has no adapter {active!r}; it has {sorted(model.peft_config)}")
    config = model.peft_config[active]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise ValueError(f"the adapter {active!r} is of the type {kind}: only LORA can be pushed")
    if config.use_dora:
        raise ValueError(f"the adapter {active!r} uses DoRA (use_dora=True), which engines do not compute")
    if config.modules_to_save:
        raise ValueError(f"the adapter {active!r} has modules_to_save={sorted(config.modules_to_save)}: whole modules "
                         "are not part of an adapter here; push them with base=")
    _refuse_merged(model)
    tensors = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    if not tensors:
        raise ValueError(f"the model has no weights of the adapter {active!r} any more: {MERGED}")
    return {_plain_name(name): tensor for name, tensor in tensors.items()}, config


def _base_of(model: Any) -> Tensors:
    """Base weights under the names of their checkpoint, whether or not a LoRA is around them; tied ones once."""
    _refuse_merged(model)
    return {_plain_name(name).removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): parameter.detach()
            for name, parameter in model.named_parameters() if ".lora_" not in name}


# ---- configs ----

def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", str(value))


def _config_json(config: Any) -> bytes:
    if isinstance(config, (str, os.PathLike)):
        path = pathlib.Path(config)
        return (path / "adapter_config.json" if path.is_dir() else path).read_bytes()
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    return json.dumps(fields, default=_plain).encode()


# ---- what is pushed ----

def _refuse_unsendable(name: str, tensor: Any) -> None:
    """Raises unless it is a tensor with bytes to send."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor is wanted, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: a tensor of the layout {tensor.layout} cannot be pushed: push tensor.to_dense()")
    if tensor.is_meta:
        raise ValueError(f"{name}: a meta tensor, which has no values: load the weights before the push; of a model "
                         "that is offloaded, push its directory, or load it without")


def _sizes(tensors: Mapping[str, Any]) -> list[int]:
    values = list(tensors.values())
    if not values or isinstance(values[0], Region):
        return [region.nbytes for region in values]
    import torch

    try:
        sendable = (set(map(operator.attrgetter("layout"), values)) <= {torch.strided}
                    and not any(map(operator.attrgetter("is_meta"), values)))
    except AttributeError:
        sendable = False
    if not sendable:
        for name, tensor in tensors.items():
            _refuse_unsendable(name, tensor)
    return list(map(operator.attrgetter("nbytes"), values))


@dataclasses.dataclass(frozen=True)
class Part:
    """An adapter, or the base weights (name None), ready to be sent."""

    name: str | None
    tensors: Mapping[str, Any]
    config: bytes = b""
    pinned: bool = False
    sizes: list[int] = dataclasses.field(init=False)  # bytes of each tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _sizes(self.tensors))

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


def adapter_part(name: str, adapter: Adapter | Source) -> Part:
    if not isinstance(adapter, Adapter):
        adapter = Adapter(adapter)
    source, config = adapter.source, adapter.config
    if isinstance(source, (str, os.PathLike)):
        path = pathlib.Path(source)
        tensors: Mapping[str, Any] = _read_directory(path, "adapter_model")
        config = path if config is None else config
    elif isinstance(source, Mapping):
        tensors = source
        if config is None:
            raise TypeError(f"the adapter {name!r} is a dict of tensors: it needs config=, a LoraConfig or the fields "
                            "of an adapter_config.json")
        if ".base_layer." in "\0".join(tensors):
            whole = next(key for key in tensors if ".base_layer." in key)
            raise ValueError(f"the adapter {name!r}: {whole} is a whole base weight, which is no part of an adapter; "
                             "take the dict from peft.get_peft_model_state_dict(model)")
    elif _is_module(source):
        model = unwrap(source)
        if not hasattr(model, "peft_config"):
            raise TypeError(f"the adapter {name!r}: {type(model).__name__} is not a PEFT model; {MERGED}")
        tensors, own = _peft_adapter(model, adapter.peft_adapter)
        config = own if config is None else config
    else:
        raise TypeError(f"the adapter {name!r}: a PEFT model, a dict of tensors or a directory is wanted, not "
                        f"{type(source).__name__}")
    return Part(name, dict(tensors), _config_json(config), adapter.pinned)


def base_part(source: Source) -> Part:
    if isinstance(source, (str, os.PathLike)):
        return Part(None, _read_directory(pathlib.Path(source), "model"))
    if isinstance(source, Mapping):
        return Part(None, dict(source))
    if _is_module(source):
        return Part(None, _base_of(unwrap(source)))
    raise TypeError(f"base: a model, a dict of tensors or a directory is wanted, not {type(source).__name__}")


# ---- regions of memory ----

class _Torch:
    """What is asked of torch for every tensor, looked up once. There may be tens of thousands of small tensors, each
    of which costs more in calls than in bytes: they are asked in columns, one attribute of all of them at a time."""

    def __init__(self) -> None:
        import torch

        self.dtypes = {getattr(torch, name): code for name, code in _library.DTYPES.items() if hasattr(torch, name)}
        self.plain = {torch.Tensor, torch.nn.Parameter}
        self.tensor = torch.Tensor

    def lie_ready(self, tensors: list[Any]) -> bool:
        """Whether all of them are plain tensors, contiguous in host memory, of dtypes that can be pushed."""
        return (set(map(type, tensors)) <= self.plain and all(map(operator.attrgetter("is_cpu"), tensors))
                and all(map(self.tensor.is_contiguous, tensors)) and not any(map(self.tensor.is_neg, tensors))
                and set(map(operator.attrgetter("dtype"), tensors)) <= self.dtypes.keys())

    def host(self, name: str, tensor: Any) -> Any:
        """The tensor, or a copy of it, contiguous in host memory."""
        if self.lie_ready([tensor]):
            return tensor
        if tensor.dtype not in self.dtypes:
            raise TypeError(f"{name}: a tensor of {tensor.dtype} cannot be pushed")
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):  # a DTensor: all ranks gather it
            tensor = tensor.full_tensor()
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        return tensor.cpu().contiguous()


@dataclasses.dataclass
class PackedUnit:
    """Where an array of hr_tensor lies, and everything that must live as long."""

    address: int
    count: int
    alive: list[Any]


class _Names:
    """The names of a part as C strings, one behind the other."""

    def __init__(self, names: list[str]) -> None:
        joined = "\0".join(names)
        if joined.count("\0") != max(len(names) - 1, 0):
            raise ValueError(f"the names of tensors have a NUL byte in them: {next(n for n in names if chr(0) in n)!r}")
        self.text = ctypes.create_string_buffer(joined.encode())
        start = ctypes.addressof(self.text)
        ends = itertools.accumulate(map(len, names if joined.isascii() else map(str.encode, names)), initial=0)
        self.addresses = list(map(operator.add, ends, range(start, start + len(names))))


def _cuts(sizes: list[int], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Runs of tensors with at most most_bytes; a larger one by itself."""
    ends = list(itertools.accumulate(sizes, initial=0))
    first = 0
    while first < len(sizes):
        last = max(first + 1, bisect.bisect_right(ends, ends[first] + most_bytes) - 1)
        yield first, last
        first = last


def _fill(words: array.array[int], addresses: list[int], dtypes: list[int], shapes: list[Any], data: list[int],
          sizes: list[int]) -> None:
    """An array of hr_tensor, column by column."""
    step = _library.TENSOR_WORDS
    halves, ndims = memoryview(words).cast("B").cast("I"), array.array("I", map(len, shapes))
    halves[2 * _library.KIND_WORD::2 * step] = memoryview(array.array("I", dtypes))
    halves[2 * _library.KIND_WORD + 1::2 * step] = memoryview(ndims)
    words[_library.NAME_WORD::step] = array.array("Q", addresses)
    most = max(ndims)
    if min(ndims) < most:
        shapes = [(*shape, *[0] * (most - len(shape))) for shape in shapes]
    for dim in range(most):
        words[_library.SHAPE_WORD + dim::step] = array.array("Q", map(operator.itemgetter(dim), shapes))
    words[_library.DATA_WORD::step] = array.array("Q", data)
    words[_library.SIZE_WORD::step] = array.array("Q", sizes)


def pack(part: Part, most_bytes: int) -> Iterator[PackedUnit]:
    """The part in units of at most most_bytes; a larger tensor is one of its own."""
    torch: _Torch | None = None
    names, items = list(part.tensors), list(part.tensors.values())
    table = _Names(names)
    for first, last in _cuts(part.sizes, most_bytes):
        unit, sizes = items[first:last], part.sizes[first:last]
        if isinstance(unit[0], Region):
            dtypes, shapes = [region.dtype for region in unit], [region.shape for region in unit]
            unit = [(ctypes.c_char * region.nbytes).from_buffer(region.read()) for region in unit]
            data = list(map(ctypes.addressof, unit))
        else:
            torch = torch or _Torch()
            if not torch.lie_ready(unit):
                unit = list(map(torch.host, names[first:last], unit))
                sizes = [tensor.nbytes for tensor in unit]
            dtypes = list(map(torch.dtypes.__getitem__, map(operator.attrgetter("dtype"), unit)))
            shapes = list(map(operator.attrgetter("shape"), unit))
            data = list(map(torch.tensor.data_ptr, unit))
        most = max(map(len, shapes))
        if most > _library.MAX_DIMS:
            name = next(name for name, shape in zip(names[first:last], shapes) if len(shape) == most)
            raise ValueError(f"{name}: {most} dimensions; at most {_library.MAX_DIMS} can be pushed")
        words = array.array("Q", bytes(_library.TENSOR_BYTES * len(unit)))
        _fill(words, table.addresses[first:last], dtypes, shapes, data, sizes)
        yield PackedUnit(words.buffer_info()[0], len(unit), [words, table, unit])
