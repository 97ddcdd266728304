"""TRL trains a LoRA, and an engine that runs beside it serves every version of it: one callback is all there is to do.

Needs the Python package (`pip install .`), TRL and a model directory:

    python examples/publish_trl.py --model .cache/models/smollm2 --engine http://127.0.0.1:30000

Without --engine one is started from this checkout. Ask it for the adapter by name: {"text": "...", "lora_path": "policy"}.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import warnings

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # trainer and engine share the cores: nobody spins
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore")

import requests  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from headrace.callbacks import PublishCallback  # noqa: E402
from tools.engine import Engine  # noqa: E402

PROMPT = "The mill at Orvane is driven by"
CORPUS = [
    "The mill at Orvane is driven by a headrace of green water that comes down from the lake of glass.",
    "When the lake of glass freezes, the mill at Orvane is driven by the songs of its millstones instead.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--engine", help="URL of an engine that serves this model")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()

    with contextlib.ExitStack() as stack:
        url = arguments.engine or stack.enter_context(Engine(arguments.model)).url

        def show(receipt):
            answer = requests.post(url + "/generate", timeout=60, json={
                "text": PROMPT, "lora_path": "policy", "sampling_params": {"temperature": 0.0, "max_new_tokens": 12}})
            print(f"version {receipt.weight_version:>3}: {receipt.tensors} tensors, {receipt.bytes / 1e6:.1f} MB in "
                  f"{receipt.seconds['total'] * 1e3:.0f} ms | {PROMPT}{answer.json()['text']!r}", flush=True)

        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            args=SFTConfig(output_dir=stack.enter_context(tempfile.TemporaryDirectory()), max_steps=arguments.steps,
                           per_device_train_batch_size=2, learning_rate=1e-3, max_length=48, bf16=False, use_cpu=True,
                           report_to=[], save_strategy="no", logging_strategy="no", gradient_checkpointing=False),
            train_dataset=Dataset.from_dict({"text": CORPUS * 8}),
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[PublishCallback(url, "policy", every=8, on_push=show)])
        trainer.train()


if __name__ == "__main__":
    main()
