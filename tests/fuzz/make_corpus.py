"""Writes the seeds of tests/fuzz/corpus/{json,safetensors,hf_config,peft}: small inputs of every form the readers know."""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"


def put(target, name, data):
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def make_json():
    put("json", "kinds", '{"a":[1,-2.5e3,true,false,null,"x"],"b":{},"c":[]}')
    put("json", "escapes", r'"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"')
    put("json", "utf8", '"é😀中"')
    put("json", "bad-utf8", b'"\xed\xa0\x80"')
    put("json", "nul", b'{"a":"b\x00c"}')
    put("json", "escaped-nul", r'{"a\u0000b":1}')
    put("json", "twice", '{"k":1,"k":2}')
    put("json", "deep", "[" * 80 + "]" * 80)
    put("json", "huge-number", '[1e999,9007199254740993,"18446744073709551615"]')
    put("json", "long-number", "1" * 70)
    put("json", "trailing", "{} x")


def image(header, data=b""):
    text = header if isinstance(header, str) else json.dumps(header)
    return struct.pack("<Q", len(text.encode())) + text.encode() + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def make_safetensors():
    two = {"b": entry("BF16", [2, 2], 8, 16), "a": entry("F32", [2], 0, 8)}
    put("safetensors", "empty", image("{}"))
    put("safetensors", "two-out-of-order", image(two, bytes(16)))
    put("safetensors", "metadata", image({"__metadata__": {"format": "pt"}, **two}, bytes(16)))
    put("safetensors", "spaces", image(json.dumps(two) + "     ", bytes(16)))
    put("safetensors", "nul-padding", image(json.dumps(two) + "\0\0\0", bytes(16)))
    put("safetensors", "zero-size", image({"z": entry("F32", [0, 16], 0, 0), "s": entry("F64", [], 0, 8)}, bytes(8)))
    put("safetensors", "shared", image({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, bytes(4)))
    put("safetensors", "hole", image({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)}, bytes(9)))
    put("safetensors", "overlap", image({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)}, bytes(7)))
    put("safetensors", "trailing", image({"a": entry("U8", [4], 0, 4)}, bytes(5)))
    put("safetensors", "backwards", image({"a": entry("U8", [4], 4, 0)}, bytes(4)))
    put("safetensors", "cut", image({"a": entry("U8", [400], 0, 400)}, bytes(4)))
    put("safetensors", "overflow", image({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}))
    put("safetensors", "twice", image('{"a":%s,"a":%s}' % ((json.dumps(entry("U8", [1], 0, 1)),) * 2), bytes(1)))
    put("safetensors", "length-0", bytes(8))
    put("safetensors", "length-2-63", struct.pack("<Q", 1 << 63))


def make_hf_config():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128)
    base = dict(architectures=["LlamaForCausalLM"], model_type="llama", **sizes)
    new = {
        "default": dict(rope_type="default", rope_theta=1e4),
        "llama3": dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                       original_max_position_embeddings=64),
        "yarn": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, beta_fast=32, beta_slow=1, mscale=1, mscale_all_dim=1,
                     attention_factor=1.1, truncate=False, original_max_position_embeddings=32),
    }
    for name, rope in new.items():
        put("hf_config", name, json.dumps(base | dict(rope_parameters=rope, dtype="bfloat16", eos_token_id=[1, 2])))
    put("hf_config", "version-4", json.dumps(base | dict(rope_theta=1e4, torch_dtype="float16", bos_token_id=1, head_dim=8,
                                                         rope_scaling=dict(type="linear", factor=2.0))))
    put("hf_config", "generation", json.dumps(base | dict(eos_token_id=2)) + "\0" + json.dumps(dict(eos_token_id=[2, 3])))
    put("hf_config", "quantised", json.dumps(base | dict(quantization_config=dict(quant_method="gptq"))))
    put("hf_config", "sliding", json.dumps(base | dict(sliding_window=64, use_sliding_window=True,
                                                       layer_types=["sliding_attention"])))
    put("hf_config", "qwen2", json.dumps(base | dict(model_type="qwen2", sliding_window=64, use_sliding_window=False)))


def adapter(config, *tensors):
    return json.dumps(dict(peft_type="LORA", r=2, lora_alpha=4) | config) + "\0" + "\n".join(tensors)


def pair(module, out, inner, rank=2, dtype="F32"):
    return [f"{rank} {inner} {dtype} base_model.model.{module}.lora_A.weight",
            f"{out} {rank} {dtype} base_model.model.{module}.lora_B.weight"]


def make_peft():
    q0, q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
    embed = ["2 16 F32 base_model.model.model.embed_tokens.lora_embedding_A",
             "4 2 F32 base_model.model.model.embed_tokens.lora_embedding_B"]
    put("peft", "list", adapter(dict(target_modules=["q_proj"]), *pair(q0, 4, 4), *pair(q1, 4, 4)))
    put("peft", "regex", adapter(dict(target_modules=r".*\.0\..*q_proj"), *pair(q0, 4, 4, dtype="BF16")))
    put("peft", "exact", adapter(dict(target_modules=[q0], use_rslora=True), *pair(q0, 4, 4, dtype="F16")))
    put("peft", "layers", adapter(dict(target_modules=["q_proj"], layers_to_transform=[1], layers_pattern="layers"),
                                  *pair(q1, 4, 4)))
    put("peft", "exclude", adapter(dict(target_modules=["q_proj"], exclude_modules=r".*\.1\..*"), *pair(q0, 4, 4)))
    put("peft", "patterns", adapter(dict(target_modules=["q_proj"], rank_pattern={r"layers\.1.*": 3}, alpha_pattern={"q_proj": 1}),
                                    *pair(q0, 4, 4), *pair(q1, 4, 4, 3)))
    put("peft", "fused", adapter(dict(target_modules=["qkv_proj", "gate_up_proj"]),
                                 *pair("model.layers.0.self_attn.qkv_proj", 8, 4),
                                 *pair("model.layers.0.mlp.gate_up_proj", 12, 4)))
    put("peft", "all-linear", adapter(dict(target_modules="all-linear"), *pair(q0, 4, 4), *pair(q1, 4, 4),
                                      *pair("model.layers.0.self_attn.k_proj", 2, 4),
                                      *pair("model.layers.0.self_attn.v_proj", 2, 4),
                                      *pair("model.layers.0.mlp.gate_proj", 6, 4), *pair("model.layers.0.mlp.up_proj", 6, 4)))
    put("peft", "embedding-head", adapter(dict(target_modules=["embed_tokens", "lm_head"]), *embed, *pair("lm_head", 16, 4),
                                          "16 4 F32 base_model.model.lm_head.base_layer.weight"))
    put("peft", "saved", adapter(dict(target_modules=[q0], modules_to_save=["embed_tokens"]), *pair(q0, 4, 4),
                                 "16 4 F32 base_model.model.model.embed_tokens.weight"))
    put("peft", "dora", adapter(dict(target_modules=[q0]), *pair(q0, 4, 4), f"4 1 F32 {q0}.lora_magnitude_vector"))
    put("peft", "bias", adapter(dict(target_modules=[q0]), *pair(q0, 4, 4), f"4 1 F32 {q0}.lora_B.bias"))
    put("peft", "backtracking", adapter(dict(target_modules="(([a-z._0-9]+)+)+[!?]"), *pair(q0, 4, 4)))
    put("peft", "nested-groups", adapter(dict(target_modules="(" * 40 + "q" + ")" * 40), *pair(q0, 4, 4)))
    put("peft", "refused-fields", adapter(dict(target_modules=[q0], use_dora=False, bias="none", loftq_config={},
                                               init_lora_weights="pissa")))


if __name__ == "__main__":
    make_json()
    make_safetensors()
    make_hf_config()
    make_peft()
