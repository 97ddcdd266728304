"""A PEFT model that learns beside the engine: what trainers push, and the truth its logprobs are held to."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tools.prompts import random_tokens  # noqa: E402

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BAR = 1e-4  # the largest difference of a float32 engine from transformers and PEFT that is arithmetic
PEFT_PREFIX = "base_model.model."


class Learner:
    """A tiny model with a LoRA, in float32. `step` changes the LoRA, `step_base` the base weights too."""

    def __init__(self, model_dir, seed=1, **lora):
        torch.manual_seed(seed)
        self.dir = model_dir
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        config = LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": SEVEN, **lora})
        self.peft = get_peft_model(base, config).eval()
        self.vocab = base.config.vocab_size
        self.prompts = random_tokens(self.vocab, (3, 9, 24), seed=11)
        self.optimizer = torch.optim.AdamW([p for p in self.peft.parameters() if p.requires_grad], lr=0.02)

    def step(self):
        """One real optimiser step on random tokens."""
        ids = torch.randint(3, self.vocab, (2, 16))
        loss = self.peft(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def step_base(self, scale=0.02):
        with torch.no_grad():
            for parameter in self.base_parameters().values():
                parameter.mul_(1.0 + scale * torch.randn(parameter.shape))
        return self

    def base_parameters(self) -> dict:
        """Base weights under the names of the Hugging Face checkpoint, tied ones once."""
        named = {}
        for name, parameter in self.peft.named_parameters():
            if ".lora_" not in name:
                named[name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")] = parameter.data
        return named

    def adapter(self, prefix=PEFT_PREFIX) -> dict:
        tensors = get_peft_model_state_dict(self.peft)
        return {prefix + key.removeprefix(PEFT_PREFIX): tensor.detach().clone() for key, tensor in tensors.items()}

    def config(self) -> dict:
        """The config as it travels in JSON: PEFT's fields, sets as lists, enums as their values."""
        fields = self.peft.peft_config["default"].to_dict()
        return {key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
                for key, value in fields.items()}

    def logprobs(self, ids) -> list:
        with torch.inference_mode():
            logits = torch.log_softmax(self.peft(torch.tensor([ids])).logits[0, :-1].double(), -1)
        return logits.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    def base_logprobs(self, ids) -> list:
        with self.peft.disable_adapter():
            return self.logprobs(ids)

    def save(self, path):
        self.peft.save_pretrained(path)
        return path

    def save_base(self, path):
        """The base weights as a model directory, by way of a fresh model that never had an adapter."""
        model = AutoModelForCausalLM.from_pretrained(self.dir, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in self.base_parameters().items():
                model.get_parameter(name).copy_(tensor)
        model.save_pretrained(path)
        return path


def worst(engine, expected, prompts, adapter) -> float:
    """Largest difference of the engine's logprobs from expected(ids) over all prompts."""
    scores = engine.score(prompts, adapter)
    return max(abs(ours - theirs) for ids, score in zip(prompts, scores, strict=True)
               for ours, theirs in zip(score.prompt[1:], expected(ids), strict=True))


def assert_serves(engine, learner, adapter) -> None:
    """The engine computes what PEFT computes, and that differs visibly from the base."""
    difference = worst(engine, learner.logprobs, learner.prompts, adapter)
    assert difference <= BAR, f"{adapter}: {difference} away from PEFT"
    assert worst(engine, learner.base_logprobs, learner.prompts, adapter) > 100 * BAR, "the adapter has no effect"


def assert_serves_base(engine, learner) -> None:
    difference = worst(engine, learner.base_logprobs, learner.prompts, None)
    assert difference <= BAR, f"base: {difference} away from transformers"
