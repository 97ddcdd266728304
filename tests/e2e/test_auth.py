"""Access levels: every route that the server has, with no key, the api key and the admin key. The table below is the
truth; a route that is missing from it fails the test."""

import subprocess

import pytest
import requests

from tools.engine import BINARY, Engine

LEVELS = {
    "/generate": "normal",
    "/v1/completions": "normal",
    "/v1/models": "normal",
    "/v1/models/": "normal",
    "/load_lora_adapter": "admin_optional",
    "/unload_lora_adapter": "admin_optional",
    "/load_lora_adapter_from_tensors": "admin_optional",
    "/register_lora_adapter": "admin_optional",
    "/begin_weight_update": "admin_optional",
    "/update_weights_from_tensor": "admin_optional",
    "/update_weights_from_safetensors": "admin_optional",
    "/end_weight_update": "admin_optional",
    "/prepare_weight_update": "admin_optional",
    "/commit_weight_update": "admin_optional",
    "/abort_weight_update": "admin_optional",
    "/weight_update_status": "admin_optional",
    "/update_weights_from_disk": "admin_optional",
    "/update_weight_version": "admin_optional",
    "/get_weights_by_name": "admin_optional",
    "/weights_checker": "admin_optional",
    "/weight_digests": "admin_optional",
    "/release_memory_occupation": "admin_optional",
    "/resume_memory_occupation": "admin_optional",
    "/init_weights_update_group": "admin_optional",
    "/destroy_weights_update_group": "admin_optional",
    "/update_weights_from_distributed": "admin_optional",
    "/load_lora_adapter_from_distributed": "admin_optional",
    "/update_weights_from_ipc": "admin_optional",
    "/pull_weights": "admin_optional",
    "/pause_generation": "admin_optional",
    "/continue_generation": "admin_optional",
    "/flush_cache": "admin_optional",
    "/abort_request": "admin_optional",
    "/model_info": "normal",
    "/get_model_info": "normal",
    "/server_info": "normal",
    "/get_server_info": "normal",
    "/get_weight_version": "normal",
    "/weight_version": "normal",
    "/health": "open",
    "/health_generate": "open",
}
USER, ADMIN = "user-key-5d0c", "admin-key-91fe"
KEYS = {
    "none": [],
    "user": ["--api-key", USER],
    "admin": ["--admin-api-key", ADMIN],
    "both": ["--api-key", USER, "--admin-api-key", ADMIN],
}


def expected(level, keys, sent):
    """The rule in one place: is the call let through? SGLang's, but that the admin key opens normal routes too."""
    has_user, has_admin = keys in ("user", "both"), keys in ("admin", "both")
    if level == "open":
        return True
    if level == "admin_optional" and has_admin:
        return sent == ADMIN
    return sent == USER or (has_admin and sent == ADMIN) if has_user else True


@pytest.fixture(scope="module", params=KEYS)
def keys(request):
    return request.param


@pytest.fixture(scope="module")
def engine(tiny_dir, keys):
    with Engine(tiny_dir, *KEYS[keys], skip_tokenizer=True) as engine:
        yield engine
        log = engine.log()
        assert USER not in log and ADMIN not in log


def header(key):
    return {"Authorization": f"Bearer {key}"} if key else {}


def server_info(engine, keys):
    reply = requests.get(engine.url + "/server_info", headers=header(USER if keys in ("user", "both") else None), timeout=20)
    assert reply.status_code == 200
    return reply


def test_every_route_is_in_the_table(engine, keys):
    routes = {route["path"]: route["level"] for route in server_info(engine, keys).json()["routes"]}
    assert routes == LEVELS


def test_every_route_lets_in_whom_it_should(engine, keys):
    for route in server_info(engine, keys).json()["routes"]:
        path = route["path"] + ("none" if route["path"].endswith("/") else "")
        for method in route["methods"].split(", "):
            for sent in (None, USER, ADMIN, "wrong", USER + "x"):
                reply = requests.request(method, engine.url + path, headers=header(sent), data=b"[]", timeout=60)
                allowed = expected(LEVELS[route["path"]], keys, sent)
                assert (reply.status_code != 401) == allowed, (method, path, sent, reply.status_code)
                if not allowed and method != "HEAD":
                    assert reply.json() == {"error": "Unauthorized"}


def test_a_refused_call_changes_nothing(engine, keys):
    if keys == "none":
        return
    for path in ("/pause_generation", "/load_lora_adapter"):
        assert requests.post(engine.url + path, json={}, headers=header("wrong"), timeout=20).status_code == 401
    assert server_info(engine, keys).json()["internal_states"][0]["paused"] is False


def test_a_big_body_without_a_key_is_read_and_dropped(engine, keys):
    if keys in ("user", "both"):
        reply = requests.post(engine.url + "/generate", data=b"x" * (40 << 20), timeout=60)
        assert reply.status_code == 401


def test_unknown_routes_need_the_api_key_too(engine, keys):
    wanted = 401 if keys in ("user", "both") else 404
    assert requests.get(engine.url + "/no/such/route", timeout=20).status_code == wanted
    assert requests.get(engine.url + "/no/such/route", headers=header(USER), timeout=20).status_code == 404


def test_one_key_is_enough_for_every_command(engine, keys, adapter_dirs):
    key = {"none": [], "user": ["--api-key", USER]}.get(keys, ["--api-key", ADMIN])
    adapter = ["--adapter", f"a={adapter_dirs['qv-r1']}"]
    for words in (["push", *adapter], ["verify", *adapter], ["status"],
                  ["generate", "--adapter", "a", "--ids", "5", "--max-new-tokens", "1"]):
        done = subprocess.run([str(BINARY), *words, "--engine", engine.url, *key], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_health_metrics_and_options_are_open(engine):
    assert requests.get(engine.url + "/health", timeout=20).status_code == 200
    assert requests.get(engine.url + "/healthy", timeout=20).status_code == 404
    assert requests.get(engine.url + "/metrics", timeout=20).status_code == 404
    reply = requests.options(engine.url + "/generate", timeout=20)
    assert reply.status_code == 405 and "POST" in reply.headers["Allow"]


@pytest.mark.parametrize("value", [USER, f"Basic {USER}", f"Bearer{USER}", "Bearer", "", f"Bearer {USER} x", f"Token {USER}"])
def test_other_forms_of_the_header_are_no_key(engine, keys, value):
    reply = requests.get(engine.url + "/model_info", headers={"Authorization": value}, timeout=20)
    assert reply.status_code == (401 if keys in ("user", "both") else 200)


def test_the_scheme_has_no_case(engine):
    for scheme in ("bearer", "BEARER"):
        reply = requests.get(engine.url + "/model_info", headers={"Authorization": f"{scheme} {USER}"}, timeout=20)
        assert reply.status_code == 200


def test_no_key_is_shown(engine, keys):
    text = server_info(engine, keys).text
    assert USER not in text and ADMIN not in text and "api_key" not in text
