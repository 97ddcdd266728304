"""Field cases 8, 33 and 41 with everything at once: a trainer that updates adapters and base weights by every route, well and
badly, unloads, aborts, flushes and pauses, while clients ask. Whatever is answered has the bits of one state that was in
force while the request was there, of adapter and base together; refusals come only while a name may be gone."""

import collections
import contextlib
import json
import random
import shutil
import threading
import time

import pytest
import requests
from safetensors.torch import load_file, save, save_file

from tests.e2e import trainer_forms as forms
from tools.engine import Engine

ADAPTERS = ["seven-r8", "qv-r1", "rslora-r64", "all-linear-r16"]
NAMES = ["X", "Y"]
PROMPTS = [[(k * i * i + 5 * i + k) % 300 + 3 for i in range(length)] for k, length in ((3, 7), (5, 70), (7, 150))]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
ROUNDS, CLIENTS = 250, 8


class Timeline:
    """What a name, or the base, may have stood for at which times."""

    def __init__(self, value):
        self.lock, self.value, self.spans = threading.Lock(), value, [[0, float("inf"), value]]

    @contextlib.contextmanager
    def change(self, value):
        """Within the block both may be in force, after it only the new one."""
        span = [time.monotonic(), float("inf"), value]
        with self.lock:
            old = self.spans[-1]
            self.spans.append(span)
        yield
        with self.lock:
            old[1] = time.monotonic()
            self.value = value

    def between(self, start, end):
        with self.lock:
            return {value for first, last, value in self.spans if first <= end and start <= last}


class Trainer:
    def __init__(self, engine, bases, adapters, now):
        self.engine, self.bases, self.adapters, self.now, self.random = engine, bases, adapters, now, random.Random(7)

    def post(self, route, status=200, **body):
        reply = self.engine.post("/" + route, body)
        assert reply.status_code == status, (route, reply.text)

    def image(self, tensors, config=None, **query):
        headers = {} if config is None else {"X-Lora-Config": json.dumps(config)}
        reply = requests.post(self.engine.url + "/update_weights_from_safetensors", params=query, data=save(tensors),
                              headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text

    def upsert(self, name, adapter, base):
        config, tensors, _ = self.adapters[adapter]
        with self.now[name].change(adapter):
            if self.random.random() < 0.5:
                self.image(tensors, config, lora_name=name)
            else:
                self.post("load_lora_adapter_from_tensors", lora_name=name, config_dict=config, upsert=True,
                          serialized_tensors=forms.plain(tensors))

    def reload(self, name, adapter, base):
        if self.now[name].value is not None:
            with self.now[name].change(None):
                self.post("unload_lora_adapter", lora_name=name)
        with self.now[name].change(adapter):
            self.post("load_lora_adapter", lora_name=name, lora_path=str(self.adapters[adapter][2]))

    def bad_upsert(self, name, adapter, base):
        config, tensors, _ = self.adapters[adapter]
        key = self.random.choice(sorted(tensors))
        self.post("load_lora_adapter_from_tensors", 400, lora_name=name, config_dict=config, upsert=True,
                  serialized_tensors=forms.plain({**tensors, key: tensors[key] * float("nan")}))

    def session(self, name, adapter, base, whole=True):
        config, tensors, _ = self.adapters[adapter]
        named = [(f"{name}:{key}", tensor) for key, tensor in tensors.items()][0 if whole else 1:]
        named += load_file(self.bases[base] / "model.safetensors").items()
        self.random.shuffle(named)
        self.post("register_lora_adapter", lora_name=name, config_dict=config)
        self.post("begin_weight_update")
        for i in range(0, len(named), 9):
            self.post("update_weights_from_tensor", serialized_named_tensors=[forms.plain(named[i: i + 9])], flush_cache=False)
        if whole:
            with self.now[name].change(adapter), self.now["base"].change(base):
                self.post("end_weight_update")
            return
        self.post("end_weight_update", 400)

    def bad_session(self, name, adapter, base):
        self.session(name, adapter, base, whole=False)
        if self.now[name].value is None:
            self.post("unload_lora_adapter", lora_name=name)

    def base(self, name, adapter, base):
        flags = {"abort_all_requests": self.random.random() < 0.3, "flush_cache": self.random.random() < 0.5}
        tensors = load_file(self.bases[base] / "model.safetensors")
        with self.now["base"].change(base):
            how = self.random.randrange(3)
            if how == 0:
                self.post("update_weights_from_disk", model_path=str(self.bases[base]), **flags)
            elif how == 1:
                self.post("update_weights_from_tensor", serialized_named_tensors=[forms.plain(list(tensors.items()))], **flags)
            else:
                self.image(tensors, **{key: str(value).lower() for key, value in flags.items()})

    def bad_base(self, name, adapter, base):
        tensors = load_file(self.bases[base] / "model.safetensors")
        last = max(tensors)
        named = list({**tensors, last: tensors[last][:-1]}.items())
        self.post("update_weights_from_tensor", 400, serialized_named_tensors=[forms.plain(named)])

    def disturb(self, name, adapter, base):
        self.engine.post(*self.random.choice([("/flush_cache", {}), ("/abort_request", {"abort_all": True}),
                                              ("/update_weight_version", {"new_version": "v", "abort_all_requests": False})]))
        if self.random.random() < 0.3:
            self.engine.call("/pause_generation", {"mode": "abort"})
            self.engine.call("/continue_generation", {})

    def act(self):
        steps = [self.upsert, self.upsert, self.reload, self.bad_upsert, self.session, self.bad_session, self.base, self.bad_base,
                 self.disturb]
        self.random.choice(steps)(self.random.choice(NAMES), self.random.choice(ADAPTERS), self.random.choice(sorted(self.bases)))


class Client(threading.Thread):
    def __init__(self, seed, engine, now, expected, over):
        super().__init__()
        self.random, self.engine, self.now, self.expected, self.over = random.Random(seed), engine, now, expected, over
        self.wrong, self.counts = [], collections.Counter()

    def run(self):
        with requests.Session() as http:
            while not self.over.is_set() and not self.wrong:
                name, prompt = self.random.choice([None, *NAMES]), self.random.randrange(len(PROMPTS))
                body = {"input_ids": PROMPTS[prompt], "lora_path": name, "return_logprob": True,
                        "sampling_params": {**SAMPLING, "n": self.random.choice([1, 1, 3])}}
                start = time.monotonic()
                reply = http.post(self.engine.url + "/generate", json=body, timeout=60)
                span = start, time.monotonic()
                served = self.now[name].between(*span) if name else {None}
                if reply.status_code == 200:
                    items = reply.json() if isinstance(reply.json(), list) else [reply.json()]
                    self.check(items, prompt, served - ({None} if name else set()), self.now["base"].between(*span))
                elif reply.status_code != 400 or name is None or None not in served:
                    self.wrong.append((name, served, reply.status_code, reply.text))
                else:
                    self.counts["refused"] += 1

    def check(self, items, prompt, adapters, bases):
        allowed = [self.expected[base, adapter, prompt] for base in bases for adapter in adapters]
        for item in items:
            meta = item["meta_info"]
            answer = item["output_ids"], [triple[0] for triple in meta["output_token_logprobs"]]
            if meta["finish_reason"]["type"] == "abort":
                self.counts["aborted"] += 1
            elif answer in allowed:
                self.counts["served"] += 1
            else:
                of = [state for state, bits in self.expected.items() if bits == answer]
                self.wrong.append((adapters, bases, "came", of, meta))


@pytest.fixture(scope="module")
def bases(tiny_dir, tmp_path_factory):
    new = shutil.copytree(tiny_dir, tmp_path_factory.mktemp("base") / "new")
    tensors = load_file(new / "model.safetensors")
    save_file({name: tensor * 1.1 + 0.01 for name, tensor in tensors.items()}, new / "model.safetensors", {"format": "pt"})
    return {"old": tiny_dir, "new": new}


@pytest.fixture(scope="module")
def adapters(adapter_dirs):
    return {name: (json.loads((adapter_dirs[name] / "adapter_config.json").read_text()),
                   load_file(adapter_dirs[name] / "adapter_model.safetensors"), adapter_dirs[name]) for name in ADAPTERS}


@pytest.fixture(scope="module")
def expected(bases, adapters):
    found = {}
    for base, path in bases.items():
        with Engine(path, skip_tokenizer=True) as cold:
            for name in ADAPTERS:
                cold.load(name, adapters[name][2])
            for name in [None, *ADAPTERS]:
                for i, score in enumerate(cold.score(PROMPTS, name, 12)):
                    found[base, name, i] = score.ids, score.output
    assert len({str(bits) for bits in found.values()}) == len(found)
    return found


def test_every_answer_is_of_one_state_that_was_in_force(bases, adapters, expected):
    with Engine(bases["old"], "--max-running-requests", 12, "--max-loaded-loras", 3, "--max-total-tokens", 4000,
                skip_tokenizer=True) as engine:
        now, over = {"base": Timeline("old"), "X": Timeline(None), "Y": Timeline(None)}, threading.Event()
        trainer = Trainer(engine, bases, adapters, now)
        clients = [Client(seed, engine, now, expected, over) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            for _ in range(ROUNDS):
                trainer.act()
        finally:
            over.set()
            for client in clients:
                client.join()
        assert not [wrong for client in clients for wrong in client.wrong]
        counts = sum((client.counts for client in clients), collections.Counter())
        assert counts["served"] > ROUNDS and counts["refused"] > 0 and counts["aborted"] > 0, counts
        for name in NAMES:
            if now[name].value is not None:
                for i, score in enumerate(engine.score(PROMPTS, name, 12)):
                    assert (score.ids, score.output) == expected[now["base"].value, now[name].value, i]
        state = engine.get("/server_info").json()["internal_states"][0]
        assert state["leases"] == 0 and state["leases_acquired"] == state["leases_released"]
        assert state["kv_pages_free"] + state["kv_pages_cached"] == state["kv_pages"]
