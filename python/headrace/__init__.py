"""Headrace for trainers: publishes LoRA adapters and base weights to inference engines in one verified stream.

    publisher = headrace.Publisher("http://127.0.0.1:30000")
    receipt = publisher.push(peft_model, adapter="policy", version=step)

`headrace.callbacks` has a callback for Hugging Face Trainer and TRL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headrace import _library
from headrace.publisher import Publisher
from headrace.receipts import EngineReceipt, HeadraceError, Receipt
from headrace.sources import Adapter

if TYPE_CHECKING:
    from headrace import callbacks


def __getattr__(name: str) -> Any:
    """`headrace.callbacks` imports transformers, so it is loaded when somebody asks for it."""
    if name == "callbacks":
        return importlib.import_module("headrace.callbacks")
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")


__version__: str = _library.text(_library.LIBRARY.hr_version())
__all__ = ["Adapter", "EngineReceipt", "HeadraceError", "Publisher", "Receipt", "__version__", "callbacks"]
