"""Reports from the field that no other test owns, by the number of the case. After each the engine is at rest: every
lease is back and every page is free or cached."""

import concurrent.futures
import json
import os
import random
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools import make_tiny_adapters, make_tiny_models
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}


def state(engine):
    return engine.get("/server_info").json()["internal_states"][0]


def at_rest(engine):
    deadline = time.monotonic() + 20
    while True:
        now = state(engine)
        if now["running"] == now["queued"] == now["leases"] == 0:
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    assert now["leases_acquired"] == now["leases_released"], now
    assert now["kv_pages_free"] + now["kv_pages_cached"] == now["kv_pages"], now
    assert now["requests_started"] == now["requests_finished"] + now["requests_aborted"], now
    assert len(answer(engine)) == 6


@pytest.fixture(scope="module")
def server(tiny_dir):
    with pytest.MonkeyPatch.context() as patch:
        # In a build with the sanitizer, else of no effect: what was freed counts as free soon.
        patch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1")
        engine = Engine(tiny_dir, dtype="bfloat16", skip_tokenizer=True)
    with engine:
        yield engine
        assert engine.process.poll() is None, engine.log()


@pytest.fixture
def engine(server):
    yield server
    at_rest(server)
    for name in loaded(server):
        server.unload(name)


@pytest.fixture
def copy(adapter_dirs, tmp_path):
    def make(name="seven-r8"):
        return shutil.copytree(adapter_dirs[name], tmp_path / name)
    return make


def answer(engine, adapter=None):
    return engine.generate(input_ids=PROMPT, lora_path=adapter, sampling_params=GREEDY)["output_ids"]


def loaded(engine):
    return {card["id"] for card in engine.get("/v1/models").json()["data"][1:]}


def edit_tensors(path, change):
    file = path / "adapter_model.safetensors"
    save_file({key: change(key, value) for key, value in load_file(file).items()}, file)


def descriptors(engine):
    return len(os.listdir(f"/proc/{engine.process.pid}/fd"))


def resident_kib(engine):
    lines = open(f"/proc/{engine.process.pid}/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "added_tokens.json"])
def test_case_12_a_fifo_in_place_of_a_file_does_not_hold_a_load(engine, copy, file):
    path = copy()
    (path / file).unlink(missing_ok=True)
    os.mkfifo(path / file)
    started = time.monotonic()
    reply = engine.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
    assert reply.status_code == 400 and "not a regular file" in reply.json()["error_message"]
    assert time.monotonic() - started < 5 and not loaded(engine)


def test_case_12_an_adapter_that_is_rewritten_while_it_loads(engine, copy):
    """Each load is refused or gives the whole adapter; a file that is cut short under it does not end the process."""
    path = copy()
    engine.load("whole", path)
    expected = engine.score([PROMPT], "whole")
    file, over = path / "adapter_model.safetensors", threading.Event()
    image = file.read_bytes()

    def rewrite():
        while not over.is_set():
            os.truncate(file, 4096)
            file.write_bytes(image)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(300):
            reply = engine.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
            assert reply.status_code in (200, 400)
            if reply.status_code == 200:
                assert engine.score([PROMPT], "x") == expected
                engine.unload("x")
    finally:
        over.set()
        writer.join()


def test_case_14_ranks_follow_one_another_in_one_place(engine, adapter_dirs):
    """Fused and separate projections of ranks 64, 8, 1, 20 and 16, each loaded where another was before."""
    names = ["rslora-r64", "fused-r8", "qv-r1", "layers-r20", "all-linear-r16"]
    alone = {}
    for name in names:
        engine.load(name, adapter_dirs[name])
        alone[name] = engine.score([PROMPT], name)
    for name in names:
        engine.unload(name)
    for name in names + names[::-1] + names[::2]:
        engine.load("place", adapter_dirs[name])
        assert engine.score([PROMPT], "place") == alone[name], name
        engine.unload("place")


def test_case_15_a_base_with_biases_keeps_them_under_an_adapter():
    model = make_tiny_models.write("qwen2-gqa-tied")
    adapters = make_tiny_adapters.write_all(model)
    with Engine(model, dtype="bfloat16", skip_tokenizer=True) as plain:
        base = plain.score([PROMPT], new_tokens=4)
    with Engine(model, "--lora-paths", f"zero={adapters['zero']}", f"real={adapters['seven-r8']}", dtype="bfloat16",
                skip_tokenizer=True) as engine:
        assert engine.score([PROMPT], new_tokens=4) == base
        mixed = engine.score([PROMPT] * 3, ["zero", "real", None], new_tokens=4)
        assert mixed[0] == mixed[2] == base[0]
        assert mixed[1].prompt != base[0].prompt
        at_rest(engine)


@pytest.mark.parametrize("name", ["GHOST", "Known", "a/b", "base:known", "known ", "known\n", "../known"])
@pytest.mark.parametrize("batch", [False, True])
def test_case_37_a_name_that_is_not_loaded_never_gets_the_base(engine, adapter_dirs, name, batch):
    engine.load("known", adapter_dirs["qv-r1"])
    before = state(engine)["generated_tokens"]
    body = {"input_ids": [PROMPT] * 3, "lora_path": ["known", name, None]} if batch else {"input_ids": PROMPT, "lora_path": name}
    reply = engine.post("/generate", body)
    assert reply.status_code == 400 and "not loaded" in reply.json()["error"]["message"]
    assert state(engine)["generated_tokens"] == before


def test_case_39_loads_leave_no_descriptor_and_no_memory_behind(engine, adapter_dirs, copy):
    bad = copy()
    (bad / "adapter_model.safetensors").write_bytes(b"short")

    def rounds(n):
        for _ in range(n):
            engine.load("x", adapter_dirs["seven-r8"])
            engine.unload("x")
            assert engine.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(bad)}).status_code == 400

    rounds(60)
    before, memory = descriptors(engine), resident_kib(engine)
    rounds(300)
    assert descriptors(engine) == before
    assert resident_kib(engine) - memory < 8 << 10


def test_case_43_more_adapters_than_may_be_loaded_all_get_served(tiny_dir, adapter_dirs):
    """Clients ask for one to three of five adapters at once where three may be loaded: each gets its own adapter's answer,
    whatever the others push out meanwhile."""
    names = ["seven-r8", "qv-r1", "rslora-r64", "embed-r4", "head-r8"]
    with Engine(tiny_dir, "--max-loaded-loras", 3, "--max-loras-per-batch", 2, skip_tokenizer=True) as engine:
        expected = {None: answer(engine)}
        for name in names:
            engine.load(name, adapter_dirs[name])
            expected[name] = answer(engine, name)

        def client(seed):
            rng = random.Random(seed)
            for _ in range(20):
                wanted = [rng.choice([*names, None]) for _ in range(rng.randint(1, 3))]
                items = engine.generate(input_ids=[PROMPT] * len(wanted), lora_path=wanted, sampling_params=GREEDY)
                assert [item["output_ids"] for item in items] == [expected[name] for name in wanted]

        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            list(pool.map(client, range(12)))
        assert len(loaded(engine)) == 3
        at_rest(engine)


def test_case_47_abort_pause_and_flush_at_once(engine):
    """Whoever aborts all can flush right after: the aborted have left the batch."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            streams = [pool.submit(engine.generate, input_ids=PROMPT + [i + 3], sampling_params=LONG) for i in range(8)]
            while not any(stream.done() for stream in streams) and state(engine)["running"] == 0:
                time.sleep(0.001)
            engine.call("/pause_generation", {"mode": "abort"})
            assert engine.get("/flush_cache").status_code == 200
            assert state(engine)["kv_pages_free"] == state(engine)["kv_pages"]
            engine.call("/continue_generation", {})
            for stream in streams:
                assert stream.result(20)["meta_info"]["finish_reason"]["type"] in ("abort", "length")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "mixed"])
def test_case_51_the_type_of_the_file_is_converted_not_ignored(engine, copy, adapter_dirs, dtype):
    """Values that float16 and bfloat16 both hold exactly give the same bits whatever type they are stored in."""
    path, count = copy(), iter(range(1000))
    kinds = [torch.float32, torch.bfloat16, torch.float16] if dtype == "mixed" else [dtype]
    edit_tensors(path, lambda key, value: value.bfloat16().masked_fill(value.abs() < 2.0**-14, 0))
    engine.load("bfloat16", path)
    edit_tensors(path, lambda key, value: value.to(kinds[next(count) % len(kinds)]))
    engine.load("other", path)
    expected, got, base = engine.score([PROMPT] * 3, ["bfloat16", "other", None])
    assert got == expected and got.prompt != base.prompt


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_case_51_an_infinity_is_refused_at_load(engine, copy, value):
    path = copy()
    edit_tensors(path, lambda key, tensor: tensor.index_fill(1, torch.tensor([0]), value) if "v_proj.lora_B" in key else tensor)
    reply = engine.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
    assert reply.status_code == 400 and "v_proj.lora_B" in reply.json()["error_message"]


@pytest.mark.parametrize("sampling", [
    {"logit_bias": {"7": 3e38, "8": -3e38}}, {"logit_bias": {str(i): -3.4e38 for i in range(320)}}, {"temperature": 1e-5},
    {"temperature": 3e38}, {"top_k": 1, "top_p": 1e-38}, {"stop_token_ids": list(range(320)), "min_new_tokens": 3}])
def test_case_56_extreme_logprobs_are_json(engine, sampling):
    def refuse(word):
        raise AssertionError(word)

    reply = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, **sampling}, "return_logprob": True,
                                      "logprob_start_len": 0, "top_logprobs_num": 320, "token_ids_logprob": [7, 8]})
    assert reply.status_code == 200
    meta = json.loads(reply.text, parse_constant=refuse)["meta_info"]
    assert len(meta["output_top_logprobs"][0]) == 320


def test_case_56_an_adapter_that_overflows_fails_alone(engine, copy):
    path = copy()
    edit_tensors(path, lambda key, value: value.float() * 1e30)
    engine.load("loud", path)
    expected = answer(engine)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        neighbours = [pool.submit(answer, engine) for _ in range(6)]
        loud = [pool.submit(engine.post, "/generate", {"input_ids": PROMPT, "lora_path": "loud"}) for _ in range(3)]
        assert all(future.result() == expected for future in neighbours)
        for future in loud:
            assert future.result().status_code == 500
            assert "not finite" in future.result().json()["error"]["message"]


def test_case_58_a_loaded_adapter_needs_its_files_no_more(engine, copy):
    path = copy()
    engine.load("x", path)
    engine.unload("x")
    engine.load("x", path)
    expected = answer(engine, "x")
    shutil.rmtree(path)
    assert all(answer(engine, "x") == expected for _ in range(50))


def test_case_66_a_new_name_for_each_version(tiny_dir, adapter_dirs):
    """The list of names and what is served agree after each load; old versions go, memory stays."""
    paths = [adapter_dirs[name] for name in ("seven-r8", "all-linear-r16", "rslora-r64")]
    with Engine(tiny_dir, "--max-loaded-loras", 4, "--max-loras-per-batch", 4, skip_tokenizer=True) as engine:
        expected, sizes = {}, []
        for version in range(42):
            body = engine.load(f"x-v{version}", paths[version % 3])
            names = {f"x-v{v}" for v in range(max(0, version - 3), version + 1)}
            assert loaded(engine) == set(body["loaded_adapters"]) == names
            output = answer(engine, f"x-v{version}")
            assert expected.setdefault(version % 3, output) == output
            sizes.append(resident_kib(engine))
        assert sizes[-1] - sizes[20] < 8 << 10
        at_rest(engine)
