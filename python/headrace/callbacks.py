"""Publishes while Hugging Face Trainer, or a trainer of TRL, trains.

    trainer = SFTTrainer(..., callbacks=[PublishCallback("http://127.0.0.1:30000", adapter="policy", every=10)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headrace.publisher import Publisher
from headrace.receipts import Receipt
from headrace.sources import Adapter


class PublishCallback(TrainerCallback):
    """Pushes the adapter that is trained: before the first step, then every so many steps, and after the last.

    The weight version of a push is the number of optimiser steps behind it.

    With several processes (torchrun, accelerate) every one of them has this callback and takes part in every push;
    replicas are compared and sent once. A publisher that is handed over must have been made with a group then.

    Args:
        publisher: a `Publisher`, or the URL or URLs of engines, for which one is made when training begins.
        adapter: its name in the engines.
        every: push after so many optimiser steps; None: whenever the trainer saves a checkpoint.
        peft_adapter: which adapter of the model; None: the active one, of which there must be one then.
        pinned: engines do not evict it.
        version: makes the weight version from the number of steps.
        on_push: called with every receipt, on every process.
        **options: of the `Publisher` that is made for URLs: api_key, timeout, pause, ...

    Attributes:
        receipt: of the last push; None before the first.
    """

    def __init__(self, publisher: Publisher | str | Sequence[str], adapter: str = "policy", *, every: int | None = 1,
                 peft_adapter: str | None = None, pinned: bool = False, version: Callable[[int], str] = str,
                 on_push: Callable[[Receipt], None] | None = None, **options: Any) -> None:
        unknown = options.keys() - (Publisher.__init__.__kwdefaults__ or {}).keys()
        if unknown:
            raise TypeError(f"{sorted(unknown)}: neither PublishCallback nor Publisher has such an option")
        if options and isinstance(publisher, Publisher):
            raise TypeError(f"{sorted(options)}: options of a publisher that is made already; give them to Publisher")
        if every is not None and every < 1:
            raise ValueError(f"every is {every}: at least 1 step, or None for every save")
        self.publisher: Publisher | str | Sequence[str] = publisher
        self.adapter = adapter
        self.every = every
        self.peft_adapter = peft_adapter
        self.pinned = pinned
        self.version = version
        self.on_push = on_push
        self.options = options
        self.receipt: Receipt | None = None
        self._pushed_step: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                       **kwargs: Any) -> None:
        """The state that training starts from, so that engines know the name before the first step."""
        self.publisher = self._connect(args.world_size)
        self._pushed_step = None
        self._push(state, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                    **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self._push(state, kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every is None:
            self._push(state, kwargs["model"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                     **kwargs: Any) -> None:
        self._push(state, kwargs["model"])

    def _connect(self, processes: int) -> Publisher:
        if not isinstance(self.publisher, Publisher):
            options = dict(self.options)
            if processes > 1 and options.get("group") is None:
                import torch.distributed

                options["group"] = torch.distributed.group.WORLD
            return Publisher(self.publisher, **options)
        if processes > 1 and self.publisher.ranks != processes:
            raise ValueError(f"{processes} processes train together, but the publisher is one of "
                             f"{self.publisher.ranks}: make it with group=torch.distributed.group.WORLD, or give the "
                             "engines' URLs instead")
        return self.publisher

    def _push(self, state: TrainerState, model: Any) -> None:
        if self._pushed_step == state.global_step:
            return
        assert isinstance(self.publisher, Publisher)  # since on_train_begin
        source = Adapter(model, pinned=self.pinned, peft_adapter=self.peft_adapter)
        self.receipt = self.publisher.push(adapters={self.adapter: source}, version=self.version(state.global_step))
        self._pushed_step = state.global_step
        if self.on_push is not None:
            self.on_push(self.receipt)
