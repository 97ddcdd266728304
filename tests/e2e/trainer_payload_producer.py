"""A program that puts an adapter into a payload of one form and holds its tensors until it is told to end.

python trainer_payload_producer.py ADAPTER_DIR. Each line of its input is "FORM FILE": the payload is written to FILE and
the file's name is answered. The form is file_descriptor, file_system or inline.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

from safetensors.torch import load_file  # noqa: E402

from tests.e2e import trainer_forms as forms  # noqa: E402


def main() -> None:
    held = []
    for line in sys.stdin:
        form, path = line.split()
        tensors = load_file(pathlib.Path(sys.argv[1]) / "adapter_model.safetensors")
        held.append(tensors)
        payload = forms.plain(tensors) if form == "inline" else forms.forked(tensors, form)
        pathlib.Path(path).write_text(payload)
        print(path, flush=True)


if __name__ == "__main__":
    main()
