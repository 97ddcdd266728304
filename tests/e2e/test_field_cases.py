"""Reports from the field by the number of their case. First where each is held; then those that no other test owns. After
each of these the engine is at rest: every lease is back and every page is free or cached.

 1  cache, adapter reload    test_differential (a name reloaded), test_field_upserts (switches the whole adapter), test_hammer
 2  cache, adapter choice    test_differential (one prompt under two adapters)
 3  upsert                   test_field_upserts; unit/weights/test_receiver (i06, i08), sim/test_session_sim
 4  unload after n=16        test_control (after parallel samples)
 5  leases of the aborted    test_control (aborts in every state, clients that vanish), sim/test_scheduler_sim
 6  pause and unload         test_field_pause; test_control (adapters load and unload while paused)
 7  KV over a base update    test_field_base, test_field_pause (32); test_updates (kv of an old version)
 8  mixed batches            test_field_crowd; test_differential (a crowd), test_parity (bits do not depend on batch)
 9  failed base updates      test_field_base; unit/engine/test_updates (a failure in place is unservable)
10  modules not named        here; test_peft_fields (tensors that do not fit the config)
11  rank and alpha patterns  test_peft_fields (modules, ranks and scales), test_parity
12  bad loads                here; test_differential (a bad adapter disturbs nobody), test_adapters
13  batch cap                test_adapters (wait their turn), sim/test_scheduler_sim
14  ranks in one place       here; test_field_upserts (switches the whole adapter)
15  biases under adapters    test_field_base
17  tied heads               test_adapters (tied head), test_parity, test_updates
18  silent failures          test_field_base, test_field_upserts, test_updates (a load without tensors), test_python_package
19  groups                   test_updates (what is not served); also 35, 48, 67
20  version between pauses   test_field_pause; test_updates (a new version aborts)
21  pausing                  test_field_pause (every route), test_control
22  sampled logprobs         test_generate (before truncation, greedy not scaled)
23  precision                test_field_precision; test_parity
24  buckets and memory       unit/weights/test_receiver (i04), test_payload_probe; 38 too
25  pickles                  test_torch_payload, test_field_base (through the server), fuzz_torch_payload, fuzz_receiver
26  ids as sent              test_generate (token ids are used as sent)
27  stops                    test_streaming (stops across tokens)
28  streamed text            test_streaming (characters are never split), test_tokenizer
29  safetensors              test_safetensors, unit/format/test_safetensors, fuzz_safetensors; 57 and 69 too
30  ids out of range         test_generate (wrong requests), test_robust (neighbours)
31  clients that leave       test_control (a client that vanishes), test_robust
32  two versions in one KV   test_field_pause; unit/engine/test_updates (frozen requests)
33  unload under fire        test_field_crowd; test_control (load and unload under fire)
34  rslora                   test_peft_fields, test_parity
36  names of trainers        test_peft_fields (known names resolve alike)
37  unknown names            here; test_completions
39  descriptors, memory      here; test_field_upserts, test_payload_probe (shared memory stays flat), test_hammer
40  keys and hostile paths   test_auth (every route); here
41  sessions                 here; test_field_crowd, test_updates, test_real_client, unit/weights/test_receiver
42  reload step by step      test_differential, test_real_client (unload before load for five steps)
43  evictions                here; test_control (more adapters than places), unit/weights/test_adapter_store
44  targets as a string      test_adapters, test_peft_fields
45  saved heads              test_adapters, test_field_upserts
46  a base for an adapter    test_field_base; unit/weights/test_receiver (i12)
47  abort and flush          test_field_pause (by update); here (by pause)
49  DoRA                     test_peft_fields, test_field_upserts
50  added tokens             unit/format/test_peft, test_updates (registration)
51  types                    here; test_field_precision, test_field_upserts, test_weight_digests
53  a failure reaches all    sim/test_publish_group_sim, test_push (dead engine), test_python_package (a failure of one rank)
54  aborts by rid            test_control (exactly its rid, nobody, all)
55  how adapters are named   test_completions; test_updates (a reply names the adapter)
56  logprobs in JSON         here
58  files needed no more     here
60  merged twice             test_field_base; test_real_client (adapter rounds leave the base), test_updates
61  replicas                 unit/cli/test_serve_options (refused); 59, 62, 63, 16 come with several ranks
64  payloads by rank         test_field_base, test_updates (a payload that is none), test_real_client
65  memory lent by trainers  test_payload_probe; device handles are refused in test_torch_payload
66  names with versions      here
68  added tokens decoded     test_tokenizer
70  quantised trainers       test_field_base; test_updates (what a bucket may not hold)
72  biases of adapters       test_peft_fields
52 (routed experts) and 71 (metrics) wait for what they are about.
"""

import concurrent.futures
import json
import os
import random
import shutil
import threading
import time

import pytest
import requests
import torch
from safetensors.torch import load_file, save, save_file

from tests.e2e import observe, trainer_forms as forms
from tools.engine import Engine

PROMPT = [5, 17, 40, 8, 99, 3, 250]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}


def at_rest(engine):
    observe.at_rest(engine)
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


def test_case_10_modules_that_the_server_was_not_told_of_are_not_dropped(tiny_dir, copy, adapter_dirs):
    """`--lora-target-modules` limits nothing here: an adapter of other modules is served, not answered by the base."""
    path = copy()
    tensors = {key: value for key, value in load_file(path / "adapter_model.safetensors").items() if "down_proj" in key}
    save_file(tensors, path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    config["target_modules"] = ["down_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    with Engine(tiny_dir, "--lora-target-modules", "qkv_proj", skip_tokenizer=True) as engine:
        engine.load("disk", path)
        engine.call("/load_lora_adapter_from_tensors", {"lora_name": "wire", "config_dict": config,
                                                        "serialized_tensors": forms.plain(tensors)})
        base, disk, wire = engine.score([PROMPT] * 3, [None, "disk", "wire"])
        assert disk == wire and disk.prompt != base.prompt


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


@pytest.mark.parametrize("value", ["q%00r", "%ff%fe", "%c0%80", "a%ed%a0%80"])
def test_case_25_a_query_that_is_no_text_is_refused(engine, adapter_dirs, value):
    """A name cut at a NUL would be another adapter's; one that is not UTF-8 could never be asked for."""
    image = (adapter_dirs["qv-r1"] / "adapter_model.safetensors").read_bytes()
    headers = {"X-Lora-Config": (adapter_dirs["qv-r1"] / "adapter_config.json").read_text().replace("\n", " ")}
    engine.load("q", adapter_dirs["qv-r1"])
    before = engine.get("/server_info").json()["adapters"], engine.get("/model_info").json()["weight_version"]
    for query in (f"lora_name={value}", f"lora_name=x&weight_version={value}", f"lora_name=x&{value}=1"):
        reply = requests.post(f"{engine.url}/update_weights_from_safetensors?{query}", data=image, headers=headers, timeout=60)
        assert reply.status_code == 400 and reply.json()["success"] is False, query
    assert (engine.get("/server_info").json()["adapters"], engine.get("/model_info").json()["weight_version"]) == before


@pytest.mark.parametrize("name", ["GHOST", "Known", "a/b", "base:known", "known ", "known\n", "../known"])
@pytest.mark.parametrize("batch", [False, True])
def test_case_37_a_name_that_is_not_loaded_never_gets_the_base(engine, adapter_dirs, name, batch):
    engine.load("known", adapter_dirs["qv-r1"])
    before = observe.state(engine)["generated_tokens"]
    body = {"input_ids": [PROMPT] * 3, "lora_path": ["known", name, None]} if batch else {"input_ids": PROMPT, "lora_path": name}
    reply = engine.post("/generate", body)
    assert reply.status_code == 400 and "not loaded" in reply.json()["error"]["message"]
    assert observe.state(engine)["generated_tokens"] == before


def test_case_39_loads_leave_no_descriptor_and_no_memory_behind(engine, adapter_dirs, copy):
    bad = copy()
    (bad / "adapter_model.safetensors").write_bytes(b"short")

    def rounds(n):
        for _ in range(n):
            engine.load("x", adapter_dirs["seven-r8"])
            engine.unload("x")
            assert engine.post("/load_lora_adapter", {"lora_name": "x", "lora_path": str(bad)}).status_code == 400

    rounds(60)
    before, memory = observe.descriptors(engine), observe.resident(engine)
    rounds(300)
    assert observe.descriptors(engine) == before
    assert observe.resident(engine) - memory < 8 << 20


def test_case_40_paths_in_a_config_are_not_followed(engine, adapter_dirs, tmp_path):
    """Fields that name places stand in every config of PEFT; a fifo in their place would hold who opens it."""
    trap = tmp_path / "trap"
    os.mkfifo(trap)
    config = json.loads((adapter_dirs["qv-r1"] / "adapter_config.json").read_text())
    tensors = load_file(adapter_dirs["qv-r1"] / "adapter_model.safetensors")
    started = time.monotonic()
    for places in ({"base_model_name_or_path": str(trap)}, {"base_model_name_or_path": "hf-internal-testing/x", "revision": "main"},
                   {"auto_mapping": {"base_model_class": "X", "parent_library": str(trap)}}, {"auto_map": {"AutoModel": "x--y.Z"}},
                   {"path": str(trap)}):
        reply = engine.post("/load_lora_adapter_from_tensors", {
            "lora_name": "x", "config_dict": {**config, **places}, "upsert": True, "serialized_tensors": forms.plain(tensors)})
        assert reply.status_code == 200 or list(places)[0] in reply.json()["error_message"]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("sent", ["nine tenths", "nothing"])
def test_case_41_a_stream_that_is_not_whole_is_not_published(engine, adapter_dirs, sent):
    """A new name without a manifest: not servable between its registration and its end, nor after a stream that lacks
    something; and registering it again finds nothing of what came before."""
    config = json.loads((adapter_dirs["seven-r8"] / "adapter_config.json").read_text())
    tensors = load_file(adapter_dirs["seven-r8"] / "adapter_model.safetensors")
    keys = sorted(tensors)

    def stream(keys):
        reply = engine.post("/begin_weight_update", {"sync_base": False, "adapters": ["x"]})
        assert reply.status_code == 200
        if keys:
            engine.call("/update_weights_from_tensor", {"flush_cache": False, "serialized_named_tensors": [
                forms.plain([(f"x:{key}", tensors[key]) for key in keys])]})
        assert engine.post("/generate", {"input_ids": PROMPT, "lora_path": "x"}).status_code == 400
        return engine.post("/end_weight_update", {})

    for part in (keys[: len(keys) * 9 // 10 // 2 * 2], keys[2:]):
        engine.call("/register_lora_adapter", {"lora_name": "x", "config_dict": config})
        reply = stream(part if sent == "nine tenths" else [])
        assert reply.status_code == 400 and "x" in reply.json()["message"]
        assert engine.post("/generate", {"input_ids": PROMPT, "lora_path": "x"}).status_code == 400
        assert "x" not in loaded(engine)
    engine.call("/register_lora_adapter", {"lora_name": "x", "config_dict": config})
    reply = engine.post("/begin_weight_update", {"sync_base": False})
    engine.call("/update_weights_from_tensor", {"flush_cache": False, "serialized_named_tensors": [
        forms.plain([(f"x:{key}", tensor) for key, tensor in tensors.items()])]})
    engine.call("/end_weight_update", {})
    engine.load("y", adapter_dirs["seven-r8"])
    assert answer(engine, "x") == answer(engine, "y")


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


@pytest.mark.parametrize("change", ["streamed over it", "rewritten", "another scale", "none", "the same in float32"])
def test_case_43_what_gave_way_comes_back_as_it_was_or_not_at_all(tiny_dir, copy, adapter_dirs, change):
    """A trainer that saves every step into one directory, or streams what it registered with a path: an evicted name that is
    asked for again is never answered with other weights than it had."""
    path = copy("seven-r8")
    file, config = path / "adapter_model.safetensors", json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(file)
    turned = {key: -value if "lora_B" in key else value for key, value in tensors.items()}
    with Engine(tiny_dir, "--max-loaded-loras", 2, "--max-loras-per-batch", 2, dtype="bfloat16", skip_tokenizer=True) as engine:
        if change == "streamed over it":
            engine.call("/register_lora_adapter", {"lora_name": "x", "config_dict": config, "lora_path": str(path)})
            engine.call("/begin_weight_update", {"sync_base": False})
            engine.call("/update_weights_from_tensor", {"flush_cache": False, "serialized_named_tensors": [
                forms.plain([(f"x:{key}", value) for key, value in turned.items()])]})
            engine.call("/end_weight_update", {})
        else:
            engine.load("x", path)
        expected = answer(engine, "x")
        for name in ("qv-r1", "rslora-r64"):
            engine.load(name, adapter_dirs[name])
        assert "x" not in loaded(engine)
        if change == "rewritten":
            save_file(turned, file)
        if change == "another scale":
            (path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 2}))
        if change == "the same in float32":
            save_file({key: value.bfloat16().float() for key, value in tensors.items()}, file)
        reply = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "x", "sampling_params": GREEDY})
        if change in ("none", "the same in float32"):
            assert reply.json()["output_ids"] == expected
        else:
            assert reply.status_code == 400 and str(path) in reply.json()["error"]["message"]
            engine.unload("x")
            engine.load("x", path)
            assert answer(engine, "x") != expected
        at_rest(engine)


def test_case_47_abort_pause_and_flush_at_once(engine):
    """Whoever aborts all can flush right after: the aborted have left the batch."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            streams = [pool.submit(engine.generate, input_ids=PROMPT + [i + 3], sampling_params=LONG) for i in range(8)]
            while not any(stream.done() for stream in streams) and observe.state(engine)["running"] == 0:
                time.sleep(0.001)
            engine.call("/pause_generation", {"mode": "abort"})
            assert engine.get("/flush_cache").status_code == 200
            assert observe.state(engine)["kv_pages_free"] == observe.state(engine)["kv_pages"]
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


@pytest.mark.parametrize("how", ["load", "upsert of a session"])
def test_case_58_a_loaded_adapter_needs_its_files_no_more(engine, copy, how):
    path = copy()
    engine.load("x", path)
    if how == "load":
        engine.unload("x")
        engine.load("x", path)
    else:
        tensors = load_file(path / "adapter_model.safetensors")
        config = json.loads((path / "adapter_config.json").read_text())
        engine.call("/register_lora_adapter", {"lora_name": "x", "config_dict": config, "lora_path": str(path)})
        engine.call("/begin_weight_update", {"sync_base": False})
        engine.call("/update_weights_from_tensor", {"flush_cache": False, "serialized_named_tensors": [
            forms.plain([(f"x:{key}", tensor) for key, tensor in tensors.items()])]})
        engine.call("/end_weight_update", {})
    expected = answer(engine, "x")
    shutil.rmtree(path)
    assert all(answer(engine, "x") == expected for _ in range(50))


@pytest.mark.parametrize("route", ["disk", "session with a path", "load call", "session", "safetensors"])
def test_case_66_a_new_name_for_each_version(tiny_dir, adapter_dirs, route):
    """The list of names, the engine's own and what is served agree after each load; memory stays. Over the cap the name
    that was used longest ago gives way, and comes back from its directory, or when it is pushed again: until then it is
    refused. Only /register_lora_adapter refuses a new name over the cap, as SGLang's does, and there is room after an
    unload."""
    paths = [adapter_dirs[name] for name in ("seven-r8", "all-linear-r16", "rslora-r64")]
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in paths]
    tensors = [load_file(path / "adapter_model.safetensors") for path in paths]

    def load(engine, name, kind):
        if route == "disk":
            return engine.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(paths[kind])})
        if route == "load call":
            return engine.post("/load_lora_adapter_from_tensors", {
                "lora_name": name, "config_dict": configs[kind], "serialized_tensors": forms.plain(tensors[kind])})
        if route == "safetensors":
            return requests.post(f"{engine.url}/update_weights_from_safetensors?lora_name={name}", data=save(tensors[kind]),
                                 headers={"X-Lora-Config": json.dumps(configs[kind])}, timeout=60)
        path = {"lora_path": str(paths[kind])} if route == "session with a path" else {}
        reply = engine.post("/register_lora_adapter", {"lora_name": name, "config_dict": configs[kind], **path})
        if reply.status_code != 200:
            return reply
        engine.call("/begin_weight_update", {"sync_base": False})
        engine.call("/update_weights_from_tensor", {"flush_cache": False, "serialized_named_tensors": [
            forms.plain([(f"{name}:{key}", tensor) for key, tensor in tensors[kind].items()])]})
        return engine.post("/end_weight_update", {})

    with Engine(tiny_dir, "--max-loaded-loras", 4, "--max-loras-per-batch", 4, skip_tokenizer=True) as engine:
        expected, sizes = {}, []
        for version in range(42):
            name, names = f"x-v{version}", {f"x-v{v}" for v in range(max(0, version - 3), version + 1)}
            reply = load(engine, name, version % 3)
            if version >= 4 and route == "session":
                assert reply.status_code == 400 and "max-loaded-loras" in reply.text
                assert engine.post("/generate", {"input_ids": PROMPT, "lora_path": name}).status_code == 400
                engine.unload(f"x-v{version - 4}")
                reply = load(engine, name, version % 3)
            assert reply.status_code == 200, reply.text
            assert loaded(engine) == names == {a["lora_name"] for a in engine.get("/server_info").json()["adapters"]}
            output = answer(engine, name)
            assert expected.setdefault(version % 3, output) == output
            sizes.append(observe.resident(engine))
        assert len({str(output) for output in expected.values()}) == 3
        assert sizes[-1] - sizes[20] < 8 << 20
        if route in ("load call", "safetensors"):
            reply = engine.post("/generate", {"input_ids": PROMPT, "lora_path": "x-v2"})
            assert reply.status_code == 400 and "push it again" in reply.text
            assert load(engine, "x-v2", 2).status_code == 200
        if route != "session":  # an old name is there again with its old content
            assert answer(engine, "x-v2") == expected[2]
        at_rest(engine)
