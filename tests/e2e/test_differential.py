"""A server that has lived, against a cold one that only ever held the final state: the replies are equal bit for bit.

Floats in the replies carry nine digits, which is enough to tell any two apart, so equal JSON means equal bits.
"""

import concurrent.futures
import random
import shutil
import threading
import time

import pytest
from safetensors.torch import load_file, save_file

from tools.engine import Engine, EngineError

VOCAB = 256
ADAPTERS = ["seven-r8", "qv-r1", "regex-r4", "all-linear-r16", "rslora-r64", "patterns", "exclude-r8", "embed-head-r16"]


def prompt_of(seed, length):
    """Prompts of one length class begin alike: the first 70 tokens depend on seed % 3 only."""
    common, own = random.Random(seed % 3), random.Random(seed)
    return [(common if i < 70 else own).randrange(VOCAB) for i in range(length)]


def body_of(prompt, name, start=-1, tokens=24, **sampling):
    return {"input_ids": prompt, "lora_path": name, "return_logprob": True, "logprob_start_len": start,
            "top_logprobs_num": 3, "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True,
                                                       **sampling}}


def answer(reply):
    """What a reply says of the model: everything but times, names and what the cache spared."""
    meta = reply["meta_info"]
    keys = ["input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs",
            "prompt_tokens", "completion_tokens", "finish_reason"]
    return {"ids": reply["output_ids"], **{key: meta.get(key) for key in keys}}


def cached(reply):
    return reply["meta_info"]["cached_tokens"]


def ask(engine, *args, **more):
    return engine.call("/generate", body_of(*args, **more))


def cold_answer(model, adapters, body):
    """From a server that was just started, holds these adapters only, and has answered nothing else."""
    with Engine(model, dtype="bfloat16", skip_tokenizer=True) as engine:
        for name, path in adapters.items():
            engine.load(name, path)
        return engine.call("/generate", body)


def at_rest(engine):
    """Every lease and every page is back."""
    stats = engine.get("/server_info").json()["internal_states"][0]
    assert stats["leases"] == 0 and stats["leases_acquired"] == stats["leases_released"], stats
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages"], stats
    assert stats["requests_started"] == stats["requests_finished"] + stats["requests_aborted"], stats


@pytest.fixture
def versions(adapter_dirs, tmp_path):
    """Five states of one adapter, as a trainer would write them: B turned, scaled and mixed."""
    made = []
    for k, factor in enumerate([1.0, -1.0, 0.5, 1.5, -0.25]):
        path = shutil.copytree(adapter_dirs["seven-r8"], tmp_path / f"v{k}")
        file = path / "adapter_model.safetensors"
        save_file({key: (tensor * factor if ".lora_B." in key else tensor).contiguous()
                   for key, tensor in load_file(file).items()}, file)
        made.append(path)
    return made


def test_a_name_reloaded_step_by_step_answers_as_if_it_had_never_been_another(tiny_dir, versions):
    body = body_of(prompt_of(1, 100), "policy")
    seen = []
    with Engine(tiny_dir, dtype="bfloat16", skip_tokenizer=True) as hot:
        for path in versions:
            hot.load("policy", path)
            first, second = hot.call("/generate", body), hot.call("/generate", body)
            assert cached(first) == 0 and cached(second) == 96
            cold = cold_answer(tiny_dir, {"policy": path}, body)
            assert answer(first) == answer(second) == answer(cold)
            assert answer(first) not in seen
            seen.append(answer(first))
            hot.unload("policy")
        at_rest(hot)


def test_one_prompt_under_two_adapters_and_the_base_interleaved(tiny_dir, adapter_dirs):
    names = {"a": adapter_dirs["seven-r8"], "b": adapter_dirs["rslora-r64"]}
    prompt = prompt_of(2, 90)
    with Engine(tiny_dir, dtype="bfloat16", skip_tokenizer=True) as hot:
        for name, path in names.items():
            hot.load(name, path)
        order = ["a", "b", None, "b", "a", "a", None, "b", None, "a"]
        replies = [(name, ask(hot, prompt, name)) for name in order]
        for name in ["a", "b", None]:
            mine = [reply for who, reply in replies if who == name]
            assert [cached(reply) for reply in mine] == [0] + [64] * (len(mine) - 1)
            cold = cold_answer(tiny_dir, {name: names[name]} if name else {}, body_of(prompt, name))
            assert all(answer(reply) == answer(cold) for reply in mine)
        # A prompt that shares a prefix only, and what was generated as part of the next turn's prompt.
        for name in ["a", None]:
            turn = prompt + replies[order.index(name)][1]["output_ids"] + prompt_of(5, 20)
            hit = ask(hot, turn, name, start=100)
            assert 64 <= cached(hit) < 100
            cold = cold_answer(tiny_dir, {name: names[name]} if name else {}, body_of(turn, name, start=100))
            assert answer(hit) == answer(cold)
        at_rest(hot)


@pytest.mark.parametrize("start", [0, 1, 32, 33, 64, 65, 96, 99])
def test_wanted_prompt_logprobs_are_computed_whatever_is_cached(tiny, start):
    prompt = prompt_of(3, 100)
    full = ask(tiny, prompt, "seven-r8", start=0)
    hit = ask(tiny, prompt, "seven-r8", start=start)
    assert cached(hit) == max(start - 1, 0) // 32 * 32
    assert hit["meta_info"]["input_token_logprobs"] == full["meta_info"]["input_token_logprobs"][start:]
    assert hit["output_ids"] == full["output_ids"]


def test_flushing_and_pausing_change_nothing_but_the_work(tiny):
    body = body_of(prompt_of(4, 120), "qv-r1", tokens=60)
    alone = answer(tiny.call("/generate", body))
    for mode in ["retract", "in_place", "retract"]:
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            running = [pool.submit(tiny.post, "/generate", body) for _ in range(12)]
            time.sleep(0.02)
            tiny.call("/pause_generation", {"mode": mode})
            if mode == "retract":
                assert tiny.post("/flush_cache", {}).status_code == 200
            time.sleep(0.02)
            tiny.call("/continue_generation", {})
            for reply in running:
                assert answer(reply.result().json()) == alone
    at_rest(tiny)


def test_a_crowd_with_joins_aborts_and_reloads_around_it(tiny_dir, adapter_dirs, versions):
    """64 requests over 8 adapters and the base on a batch and a cache far too small for them, while another name is
    loaded again and again, some are aborted and generation is paused now and then."""
    roll = random.Random(11)
    bodies = []
    for i in range(64):
        name = roll.choice(ADAPTERS + [None])
        more = {} if i % 2 else {"temperature": 1.0, "sampling_seed": i}
        bodies.append({**body_of(prompt_of(i, roll.randrange(5, 160)), name, start=roll.choice([-1, 0, 3]),
                                 tokens=roll.randrange(1, 50), **more), "rid": f"crowd{i}"})
    with Engine(tiny_dir, "--disable-radix-cache", dtype="bfloat16", skip_tokenizer=True) as cold:
        for name in ADAPTERS:
            cold.load(name, adapter_dirs[name])
        alone = [answer(cold.call("/generate", body)) for body in bodies]
        at_rest(cold)
    flags = ["--max-total-tokens", 640, "--max-running-requests", 7, "--max-loras-per-batch", 3,
             "--chunked-prefill-size", 48]
    stop = threading.Event()

    def disturb(engine):
        while not stop.is_set():
            for path in versions:
                engine.load("noise", path)
                engine.call("/generate", body_of(prompt_of(1, 80), "noise", tokens=2))
                engine.unload("noise")
            engine.call("/pause_generation", {"mode": "retract"})
            engine.call("/continue_generation", {})

    def submit(engine, body, delay, abort):
        time.sleep(delay)
        if abort:
            threading.Timer(0.05, engine.post, ("/abort_request", {"rid": body["rid"]})).start()
        return engine.call("/generate", body)

    with Engine(tiny_dir, *flags, dtype="bfloat16", skip_tokenizer=True) as hot:
        for name in ADAPTERS:
            hot.load(name, adapter_dirs[name])
        with concurrent.futures.ThreadPoolExecutor(65) as pool:
            noise = pool.submit(disturb, hot)
            replies = [pool.submit(submit, hot, body, roll.random() * 0.5, i % 9 == 4)
                       for i, body in enumerate(bodies)]
            try:
                got = [reply.result() for reply in replies]
            finally:
                stop.set()
            noise.result()
        n_aborted = 0
        for i, (mine, wanted) in enumerate(zip(got, alone)):
            mine = answer(mine)
            if i % 9 == 4 and mine["finish_reason"]["type"] == "abort":
                n_aborted += 1
                assert mine["ids"] == wanted["ids"][:len(mine["ids"])]
            else:
                assert mine == wanted, bodies[i]
        at_rest(hot)
        assert hot.process.poll() is None, hot.log()


def test_a_bad_adapter_disturbs_nobody(tiny_dir, adapter_dirs, versions, tmp_path):
    """Loads that fail in every way, and an evicted adapter whose directory is gone, beside twenty running requests."""
    body = body_of(prompt_of(7, 60), "good", tokens=40)
    with Engine(tiny_dir, "--max-loaded-loras", 2, dtype="bfloat16", skip_tokenizer=True) as hot:
        hot.load("good", adapter_dirs["seven-r8"])
        alone = answer(hot.call("/generate", body))
        lost = shutil.copytree(versions[1], tmp_path / "lost")
        hot.load("lost", lost)
        hot.call("/generate", body)
        hot.load("newer", versions[2])  # "lost" gives way, being the least recently used
        shutil.rmtree(lost)
        truncated = shutil.copytree(versions[0], tmp_path / "truncated")
        file = truncated / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            running = [pool.submit(hot.call, "/generate", body) for _ in range(20)]
            for path in [truncated, tmp_path / "nowhere", tiny_dir]:
                assert hot.post("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(path)}).status_code == 400
            with pytest.raises(EngineError, match="Failed to implicitly load LoRA adapter lost") as refusal:
                ask(hot, prompt_of(7, 60), "lost")
            assert 400 <= refusal.value.status < 500
            assert all(answer(reply.result()) == alone for reply in running)
        hot.unload("lost")
        with pytest.raises(EngineError, match="never been loaded"):
            ask(hot, prompt_of(7, 60), "lost")
        at_rest(hot)


def test_evicted_adapters_come_back_when_they_are_asked_for(tiny_dir, versions):
    """More names than may be loaded, asked for at random and at once: every answer is its own adapter's."""
    body = {k: body_of(prompt_of(k, 50), f"v{k}", tokens=8) for k in range(5)}
    with Engine(tiny_dir, "--max-loaded-loras", 2, dtype="bfloat16", skip_tokenizer=True) as hot:
        alone = {}
        for k, path in enumerate(versions):
            hot.load(f"v{k}", path)
            alone[k] = answer(hot.call("/generate", body[k]))
        roll = random.Random(3)
        order = [roll.randrange(5) for _ in range(60)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [(k, pool.submit(hot.call, "/generate", body[k])) for k in order]
            assert all(answer(reply.result()) == alone[k] for k, reply in replies)
        at_rest(hot)
