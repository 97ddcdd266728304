"""The callback beside real trainers: Hugging Face Trainer, and SFTTrainer and GRPOTrainer of TRL."""

import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e import trainer_package
from tests.e2e.trainer_hf import train
from tests.e2e.trainer_model import BAR, Learner, assert_serves, worst
from tools import make_tiny_models
from tools.engine import Engine, free_port

headrace = trainer_package.load()

from headrace.callbacks import PublishCallback  # noqa: E402


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with Engine(tiny_dir, "--enable-lora", "--max-lora-rank", 64, "--lora-target-modules", "all", dtype="float32",
                skip_tokenizer=True) as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def pushes():
    return []


def test_trainer_publishes_every_other_step(engine, tiny_dir, tmp_path, pushes):
    learner, seen = Learner(tiny_dir), []

    def on_push(receipt):
        pushes.append(receipt.weight_version)
        seen.append(worst(engine, learner.logprobs, learner.prompts, "policy"))

    train(learner, PublishCallback(engine.url, "policy", every=2, on_push=on_push), tmp_path)
    assert pushes == ["0", "2", "4", "6"]
    assert max(seen) <= BAR, seen
    assert_serves(engine, learner, "policy")


def test_trainer_publishes_what_it_saves(engine, tiny_dir, tmp_path, pushes):
    learner = Learner(tiny_dir)
    with headrace.Publisher(engine.url) as publisher:
        callback = PublishCallback(publisher, "saved", every=None, version=lambda step: f"step-{step}",
                                   on_push=lambda receipt: pushes.append(receipt.weight_version))
        train(learner, callback, tmp_path, save_strategy="steps", save_steps=3, max_steps=7)
    assert pushes == ["step-0", "step-3", "step-6", "step-7"]
    assert callback.receipt.weight_version == "step-7"
    assert_serves(engine, learner, "saved")
    # the checkpoint of step 6 is what was pushed then
    checkpoint = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32),
                                           tmp_path / "checkpoint-6")
    assert checkpoint.peft_config["default"].r == 8


def test_a_failed_push_stops_the_training(tiny_dir, tmp_path):
    gone = f"http://127.0.0.1:{free_port()}"
    with headrace.Publisher(gone, timeout=1) as publisher, pytest.raises(headrace.HeadraceError, match=gone):
        train(Learner(tiny_dir), PublishCallback(publisher), tmp_path)


def test_it_takes_the_options_of_a_publisher(tiny_dir, tmp_path, monkeypatch):
    """For the publisher that it makes from URLs."""
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with Engine(tiny_dir, "--api-key", "sesame", dtype="float32", skip_tokenizer=True) as engine:
        callback = PublishCallback(engine.url, "policy", every=6, api_key="sesame", timeout=20, transport="safetensors",
                                   progress=lambda *now: None)
        train(Learner(tiny_dir), callback, tmp_path)
        assert callback.receipt.weight_version == "6" and callback.receipt.published == "all"
        with pytest.raises(headrace.HeadraceError, match="api_key; .* HEADRACE_API_KEY"):
            train(Learner(tiny_dir), PublishCallback(engine.url, "policy"), tmp_path)
    with pytest.raises(TypeError, match=r"\['apikey'\]: neither"):
        PublishCallback(engine.url, apikey="sesame")
    with pytest.raises(TypeError, match="give them to Publisher"), headrace.Publisher(engine.url) as publisher:
        PublishCallback(publisher, timeout=3)


def test_one_of_two_active_adapters_must_be_named(engine, tiny_dir, tmp_path, pushes):
    learner = Learner(tiny_dir)
    learner.peft.add_adapter("two", LoraConfig(r=4, target_modules=["v_proj"]))
    learner.peft.base_model.set_adapter(["default", "two"])
    with pytest.raises(ValueError, match="peft_adapter="):
        train(learner, PublishCallback(engine.url, "which"), tmp_path)
    train(learner, PublishCallback(engine.url, "which", every=6, peft_adapter="two",
                                   on_push=lambda receipt: pushes.append(receipt.tensors)), tmp_path)
    assert pushes == [4, 4]


def test_processes_train_and_publish_together(engine, tiny_dir, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         "tests/e2e/trainer_hf.py", str(tiny_dir), engine.url, str(tmp_path)],
        cwd=trainer_package.ROOT, env=trainer_package.environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert sorted(line[0][1] for line in lines) == [0, 1]
    for line in lines:
        assert [(version, ranks) for version, _, ranks, _ in line] == [("0", 2), ("3", 2), ("6", 2)]
    assert [sum(sent) for sent in zip(*[[push[3] for push in line] for line in lines])] == [28, 28, 28]
    learner = Learner(tiny_dir)
    learner.peft.load_adapter(tmp_path / "trained", "trained")
    learner.peft.set_adapter("trained")
    assert_serves(engine, learner, "ddp")


def test_a_lone_publisher_among_several_processes_is_refused(engine, tiny_dir):
    class Arguments:
        world_size = 2

    with headrace.Publisher(engine.url) as publisher, pytest.raises(ValueError, match="group="):
        PublishCallback(publisher).on_train_begin(Arguments(), None, None, model=None)


# ---- TRL ----

@pytest.fixture(scope="module")
def smollm2_dir():
    return make_tiny_models.HOME / "smollm2"


@pytest.fixture(scope="module")
def smollm2_engine(smollm2_dir):
    with Engine(smollm2_dir, "--enable-lora", "--max-lora-rank", 16, "--lora-target-modules", "all",
                dtype="float32") as engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


def assert_serves_text(engine, model, tokenizer, adapter):
    """The engine's logprobs of a text are the trained model's; nearer than those of the base by far."""
    ids = tokenizer("The headrace at Orvane is three miles long.").input_ids

    def logprobs(of):
        with torch.inference_mode():
            out = torch.log_softmax(of(torch.tensor([ids])).logits[0, :-1].double(), -1)
        return out.gather(-1, torch.tensor(ids)[1:, None])[:, 0]

    model.eval()
    [score] = engine.score([ids], adapter)
    ours = torch.tensor(score.prompt[1:], dtype=torch.float64)
    with model.disable_adapter():
        effect = (ours - logprobs(model)).abs().max()
    difference = (ours - logprobs(model)).abs().max()
    assert difference < 1e-3 < effect / 10, (difference, effect)


LORA = dict(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SHORT = dict(max_steps=2, learning_rate=5e-3, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
             logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False)


def test_sft_trainer(smollm2_engine, smollm2_dir, tmp_path, pushes):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32), processing_class=tokenizer,
        args=SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, max_length=24, **SHORT),
        train_dataset=Dataset.from_dict({"text": ["The mill at Orvane is driven by a headrace."] * 8}),
        peft_config=LoraConfig(**LORA),
        callbacks=[PublishCallback(smollm2_engine.url, "sft", on_push=lambda r: pushes.append(r.weight_version))])
    trainer.train()
    assert pushes == ["0", "1", "2"]
    assert_serves_text(smollm2_engine, trainer.model, tokenizer, "sft")


def test_grpo_trainer(smollm2_engine, smollm2_dir, tmp_path, pushes):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32), processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4,
                        max_completion_length=8, **SHORT),
        train_dataset=Dataset.from_dict({"prompt": ["The mill at Orvane", "The lake of glass"] * 4}),
        peft_config=LoraConfig(**LORA),
        callbacks=[PublishCallback(smollm2_engine.url, "grpo", on_push=lambda r: pushes.append(r.weight_version))])
    trainer.train()
    assert pushes == ["0", "1", "2"]
    assert_serves_text(smollm2_engine, trainer.model, tokenizer, "grpo")
