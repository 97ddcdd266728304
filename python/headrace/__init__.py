"""Headrace for trainers: publishes LoRA adapters and base weights to inference engines in one verified stream.

    publisher = headrace.Publisher("http://127.0.0.1:30000")
    receipt = publisher.push(peft_model, adapter="policy", version=step)

`headrace.callbacks` has a callback for Hugging Face Trainer and TRL.
"""

from headrace import _library
from headrace.publisher import Publisher
from headrace.receipts import EngineReceipt, HeadraceError, Receipt
from headrace.sources import Adapter

__version__: str = _library.text(_library.LIBRARY.hr_version())
__all__ = ["Adapter", "EngineReceipt", "HeadraceError", "Publisher", "Receipt", "__version__"]
