"""The comparisons themselves. Each returns rows for the table; a row knows its bar and whether it was kept."""

import dataclasses
import random

import torch

from tests.parity.reference import Reference
from tools import make_tiny_adapters, make_tiny_models
from tools.engine import Engine
from tools.prompts import english_tokens, random_tokens

FP32_BAR = 1e-4
PROOF_BAR = 100 * FP32_BAR
CORRELATION_BAR = 0.999
EFFECT_BAR = 0.5
NEW_TOKENS = 12
LENGTHS = (1, 2, 7, 33, 64, 130)


@dataclasses.dataclass
class Row:
    model: str
    check: str
    value: float
    bar: float
    at_most: bool = True  # the value may not exceed the bar; else it must reach it
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def __str__(self):
        sign = "<=" if self.at_most else ">="
        verdict = "ok" if self.ok else "FAIL"
        return f"{self.model:<16} {self.check:<70} {self.value:>10.4g} {sign} {self.bar:<9.4g} {verdict:<4} {self.note}"


class Case:
    """One model with its adapters and prompts."""

    def __init__(self, name, adapters=None, lengths=LENGTHS):
        self.name = name
        if name in make_tiny_models.MODELS:
            self.dir = make_tiny_models.write(name)
            self.prompts = random_tokens(make_tiny_models.MODELS[name].vocab, lengths, seed=11)
        else:
            self.dir = make_tiny_models.HOME / name
            self.prompts = [ids[:length] for ids, length in zip(english_tokens(self.dir, len(lengths), max(lengths)), lengths)]
        self.adapters = make_tiny_adapters.write_all(self.dir, adapters)

    def reference_paths(self):
        """PEFT cannot read fused names; it gets the split twin of the same adapter."""
        return {name: path.with_name(name + make_tiny_adapters.SPLIT) if name.startswith("fused") else path
                for name, path in self.adapters.items()}

    def reference(self, dtype=torch.float32):
        return Reference(self.dir, self.reference_paths(), dtype)

    def engine(self, dtype, *flags):
        engine = Engine(self.dir, *flags, dtype=dtype, skip_tokenizer=True)
        try:
            for name, path in self.adapters.items():
                engine.load(name, path)
        except BaseException:
            engine.stop()
            raise
        return engine


def difference(scores, prompt, expected) -> float:
    """Largest |engine - reference| over the prompt and the generated tokens."""
    got = torch.tensor(scores.prompt[1:] + scores.output, dtype=torch.float64)
    if len(got) != len(expected):
        raise AssertionError(f"{len(got)} logprobs for {len(expected)} tokens")
    return (got - expected).abs().max().item() if len(got) else 0.0


def fp32(case) -> list[Row]:
    """Every adapter alone, then everything in one batch; then the harness shows that it would have seen a fault."""
    reference = case.reference()
    names = [None, *case.adapters]
    mixed = [(prompt, name) for prompt in case.prompts for name in names]
    random.Random(3).shuffle(mixed)
    rows = []
    with case.engine("float32") as engine:
        alone = {}
        for name in names:
            worst = 0.0
            for index, prompt in enumerate(case.prompts):
                [scores] = engine.score([prompt], name, NEW_TOKENS)
                expected = reference.chosen(prompt + scores.ids, name)
                alone[index, name] = scores
                worst = max(worst, difference(scores, prompt, expected))
            rows.append(Row(case.name, f"fp32 alone, {name or 'base'}", worst, FP32_BAR))
        worst = 0.0
        batch = engine.score([prompt for prompt, _ in mixed], [name for _, name in mixed], NEW_TOKENS)
        for (prompt, name), scores in zip(mixed, batch):
            worst = max(worst, difference(scores, prompt, reference.chosen(prompt + scores.ids, name)))
        rows.append(Row(case.name, f"fp32 mixed, {len(mixed)} requests in one call", worst, FP32_BAR))
    last = len(case.prompts) - 1
    rows += proof(case, reference, {name: alone[last, name] for name in names}, case.prompts[last])
    return rows


def proof(case, reference, scores, prompt) -> list[Row]:
    """Faults put into the reference: each must stand out from the engine's numbers 100-fold."""
    name = "seven-r8"
    ids = prompt + scores[name].ids
    layers = reference.lora_layers(name)

    # Of a deep model the modules of three layers; a forward for each of hundreds would take minutes.
    depth = reference.model.config.num_hidden_layers
    some = [f"layers.{index}." for index in {0, depth // 2, depth - 1}]
    dropped = {}
    for layer_name, layer in layers:
        if not any(part in layer_name for part in some):
            continue
        with reference.scaled(name, 0.0, [layer]):
            dropped[layer_name] = difference(scores[name], prompt, reference.chosen(ids, name))
    least = min(dropped, key=dropped.get)
    rows = [Row(case.name, f"fault seen: any one of {len(dropped)} deltas dropped", dropped[least], PROOF_BAR, False,
                least.split("layers.")[-1])]

    with reference.scaled(name, 1.1, [layer for _, layer in layers]):
        rows.append(Row(case.name, "fault seen: scale wrong by a tenth",
                        difference(scores[name], prompt, reference.chosen(ids, name)), PROOF_BAR, False))

    other = next(key for key in case.adapters if key not in (name, "zero"))
    rows.append(Row(case.name, "fault seen: two adapters swapped",
                    difference(scores[name], prompt, reference.chosen(ids, other)), PROOF_BAR, False, other))

    config = reference.model.config.rope_parameters
    if config["rope_type"] == "default":
        wrong = {"rope_type": "default", "rope_theta": config["rope_theta"] * 1.1}
    else:
        wrong = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    ids = prompt + scores[None].ids
    rows.append(Row(case.name, "fault seen: wrong RoPE",
                    difference(scores[None], prompt, Reference(case.dir, rope=wrong).chosen(ids)), PROOF_BAR, False))
    return rows


def bf16(case, adapters, prompts) -> list[Row]:
    """Mean |dlogprob| of the chosen tokens against fp32: the engine may not be further off than torch's own bf16."""
    tokens = sum(len(prompt) - 1 for prompt in prompts)
    truth, torch_bf16 = case.reference(), case.reference(torch.bfloat16)
    rows, engine_scores, truth_scores = [], {}, {}
    with case.engine("bfloat16") as engine:
        for name in [None, *adapters]:
            scores = engine.score(prompts, name)
            engine_scores[name] = torch.tensor([x for item in scores for x in item.prompt[1:]], dtype=torch.float64)
    for name in [None, *adapters]:
        truth_scores[name] = torch.cat([truth.chosen(ids, name) for ids in prompts])
        theirs = torch.cat([torch_bf16.chosen(ids, name) for ids in prompts])
        bar = (theirs - truth_scores[name]).abs().mean().item()
        ours = (engine_scores[name] - truth_scores[name]).abs().mean().item()
        rows.append(Row(case.name, f"bf16 mean error, {name or 'base'}, {tokens} tokens", ours, bar,
                        note=f"{ours / bar:.2f} of torch bf16"))
    for name in adapters:
        expected = truth_scores[name] - truth_scores[None]
        got = engine_scores[name] - engine_scores[None]
        rows.append(Row(case.name, f"bf16 adapter effect, {name} (nat)", expected.abs().mean().item(), EFFECT_BAR, False))
        correlation = torch.corrcoef(torch.stack([got, expected]))[0, 1].item()
        rows.append(Row(case.name, f"bf16 delta correlation, {name}", correlation, CORRELATION_BAR, False,
                        f"1 - {1 - correlation:.1e}"))
    return rows


def bits(case, dtype, settings) -> list[Row]:
    """The same numbers to the last digit: alone or in a crowd, whole or in chunks, with any number of threads, generated
    or scored. settings: lists of flags; each is one more engine that must agree with the first."""
    names = [None, *case.adapters]
    pairs = [(prompt, names[i % len(names)]) for i, prompt in enumerate(case.prompts * 3)]
    crowd = pairs * 2 + [(prompt, name) for prompt in case.prompts for name in names]
    random.Random(4).shuffle(crowd)
    first, rows = None, []
    for flags in settings:
        with case.engine(dtype, *flags) as engine:
            alone = [engine.score([prompt], name, NEW_TOKENS)[0] for prompt, name in pairs]
            together = engine.score([p for p, _ in crowd], [n for _, n in crowd], NEW_TOKENS)
            greedy = [engine.score([prompt + scores.ids], name)[0] for (prompt, name), scores in zip(pairs, alone)]
            sampled = [engine.score([prompt], name, NEW_TOKENS, {"temperature": 1.0, "sampling_seed": 7})[0]
                       for prompt, name in pairs]
            rescored = [engine.score([prompt + scores.ids], name)[0] for (prompt, name), scores in zip(pairs, sampled)]
        by_key = {(tuple(prompt), name): scores for (prompt, name), scores in zip(pairs, alone)}
        counts = {
            "alone is not in a crowd": mismatches((by_key[tuple(p), n], s) for (p, n), s in zip(crowd, together)
                                                  if (tuple(p), n) in by_key),
            "greedy is not scored": generated_mismatches(alone, greedy),
            "T = 1 is not scored": generated_mismatches(sampled, rescored),
            "zero B is not base": zero_mismatches(crowd, together),
            "not as with default flags": mismatches(zip(first or alone, alone)),
        }
        first = first or alone
        broken = ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
        rows.append(Row(case.name, f"{dtype} bits, {' '.join(map(str, flags)) or 'default flags'}", sum(counts.values()), 0,
                        note=broken or f"{len(crowd) + 4 * len(pairs)} requests alike"))
    return rows


def mismatches(pairs) -> int:
    return sum(left != right for left, right in pairs)


def generated_mismatches(generated, scored) -> int:
    """Requests whose generated logprobs are not, digit for digit, those of the same tokens in a prompt."""
    return sum(made.prompt + made.output != whole.prompt for made, whole in zip(generated, scored))


def zero_mismatches(crowd, together) -> int:
    base = {tuple(prompt): scores for (prompt, name), scores in zip(crowd, together) if name is None}
    return sum(scores != base[tuple(prompt)] for (prompt, name), scores in zip(crowd, together) if name == "zero")
