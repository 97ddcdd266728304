"""The other side of the comparison: transformers and PEFT, in the process, on the same directories."""

import contextlib
import warnings

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM


class Reference:
    """One model with its adapters. dtype float32 is the truth; bfloat16 is what torch makes of the same files."""

    def __init__(self, model_dir, adapters=None, dtype=torch.float32, rope=None):
        overrides = {"rope_parameters": rope} if rope else {}
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa", **overrides).eval()
        self.vocab = self.model.config.vocab_size
        self.peft = None
        for name, path in (adapters or {}).items():
            self.load(name, path)

    def load(self, name, path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.peft is None:
                self.peft = PeftModel.from_pretrained(
                    self.model, path, adapter_name=name, autocast_adapter_dtype=False).eval()
            else:
                self.peft.load_adapter(path, adapter_name=name, autocast_adapter_dtype=False)

    @contextlib.contextmanager
    def using(self, adapter):
        if self.peft is None:
            yield self.model
        elif adapter is None:
            with self.peft.disable_adapter():
                yield self.peft
        else:
            self.peft.set_adapter(adapter)
            yield self.peft

    def logprobs(self, ids, adapter=None) -> torch.Tensor:
        """[len(ids), vocab] in float64: row i is the distribution of the token after ids[: i + 1]."""
        with torch.inference_mode(), self.using(adapter) as model:
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)

    def chosen(self, ids, adapter=None) -> torch.Tensor:
        """[len(ids) - 1]: the logprob of every token but the first."""
        return self.logprobs(ids, adapter)[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]

    def lora_layers(self, adapter):
        """(name, layer) of every module the adapter changes."""
        return [(name, module) for name, module in self.peft.named_modules()
                if isinstance(module, LoraLayer) and adapter in module.scaling]

    @contextlib.contextmanager
    def scaled(self, adapter, factor, layers):
        """Within the block the delta of the given layers is multiplied by factor; 0 drops it."""
        kept = [layer.scaling[adapter] for layer in layers]
        for layer in layers:
            layer.scaling[adapter] *= factor
        try:
            yield
        finally:
            for layer, scaling in zip(layers, kept):
                layer.scaling[adapter] = scaling
