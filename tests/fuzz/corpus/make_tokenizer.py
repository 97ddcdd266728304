"""Writes the seeds of tests/fuzz/corpus/tokenizer: one tiny tokenizer.json per component, a NUL, a text."""

import json
import pathlib

OUT = pathlib.Path(__file__).parent / "tokenizer"
TEXT = "ab  a1 23é\n\u4f60 <s><w> ab\u0301'll"
VOCAB = ["a", "b", "ab", "Ġ", "Ã", "©", "▁", "▁a", "1", "2", "<unk>", "<0xC3>", "<0xA9>", "<0xE4>", "é", "Ċ", " ", "l", "'"]
SPLIT = r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = [
    {"id": len(VOCAB), "content": "<s>", "special": True, "normalized": False, "lstrip": True, "rstrip": True},
    {"id": len(VOCAB) + 1, "content": "<w>", "special": False, "normalized": True, "single_word": True},
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def write(name, normalizer=None, pre=None, post=None, decoder=None, **model):
    tree = {
        "added_tokens": ADDED, "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": post, "decoder": decoder,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(VOCAB)}, "merges": ["a b", ["▁", "a"]], **model}}
    (OUT / name).write_bytes(json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode() + b"\0" + TEXT.encode())


def main():
    OUT.mkdir(exist_ok=True)
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"<s>": {"ids": [len(VOCAB)]}}}
    write("byte_level", pre=BYTE_LEVEL, decoder={"type": "ByteLevel"}, post={"type": "ByteLevel"})
    write("split", {"type": "NFC"}, {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}, {"type": "ByteLevel"}, ignore_merges=True)
    write("spelled", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]}, None, template,
          {"type": "Sequence", "decoders": [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                                            {"type": "Strip", "content": " ", "start": 1, "stop": 1}]},
          byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    write("metaspace", {"type": "NFKD"}, METASPACE, None, METASPACE)
    write("digits", {"type": "Lowercase"}, {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, {"type": "Whitespace"}, {"type": "WhitespaceSplit"}]})
    for behavior in ["Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        write(behavior.lower(), {"type": "Strip", "strip_left": True, "strip_right": True},
              {"type": "Split", "pattern": {"String": "a"}, "behavior": behavior, "invert": True})


if __name__ == "__main__":
    main()
