"""Training runs of Hugging Face Trainer with the callback; also a program, one process of several (torchrun).

python trainer_hf.py MODEL_DIR URL OUTPUT_DIR: the last line of output is what was pushed, as JSON.
"""

import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

import torch  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from tests.e2e.trainer_model import Learner  # noqa: E402


class Rows(torch.utils.data.Dataset):
    """Random token rows."""

    def __init__(self, vocab, rows=32, length=16):
        self.ids = torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(out, **more):
    return TrainingArguments(**{
        "output_dir": str(out), "max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 0.02, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, **more})


def train(learner, callback, out, **more):
    learner.peft.train()
    trainer = Trainer(model=learner.peft, args=arguments(out, **more), train_dataset=Rows(learner.vocab),
                      callbacks=[callback])
    trainer.train()
    learner.peft.eval()
    return trainer


def main() -> None:
    from headrace.callbacks import PublishCallback

    model, url, out = sys.argv[1:]
    pushed = []
    callback = PublishCallback(url, "ddp", every=3, on_push=lambda receipt: pushed.append(
        [receipt.weight_version, receipt.rank, receipt.ranks, receipt.sent_tensors]))
    learner = Learner(model)
    train(learner, callback, out)
    learner.save(pathlib.Path(out) / "trained") if pushed[0][1] == 0 else None
    callback.publisher.close()
    print(json.dumps(pushed), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
