"""Fixed prompts, the same on every machine with the same Python: random ids for tiny models, English for real ones."""

import pydoc_data.topics


def random_tokens(vocab, lengths, seed):
    """Ids below 3 are the special ones and stay out."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def english_tokens(model_dir, count, length):
    """count prompts of length tokens from the reference pages that come with Python."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text[: count * length * 6]).input_ids
    if len(ids) < count * length:
        raise SystemExit("prompts: the pages of Python are too short for the prompts wanted")
    return [ids[i * length : (i + 1) * length] for i in range(count)]
