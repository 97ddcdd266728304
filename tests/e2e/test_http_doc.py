"""Every curl line and every Python block of docs/http.md runs, in the order of the page, and each line is answered as the
page says: 200, or the status in the comment behind it. Every route of the server stands on the page."""

import pathlib
import re
import subprocess

import pytest

from tools import make_tiny_adapters, make_tiny_models
from tools.engine import Engine

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs/http.md").read_text()


def blocks():
    return re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.M | re.S)


def commands(block):
    """(command, expected status) of every curl line; a command goes on to the next line that begins with curl."""
    for command in re.split(r"^(?=curl )", block, flags=re.M):
        match = re.fullmatch(r"(.*?)(?:\s+# (\d{3}))?\s*", command, re.S)
        if match[1]:
            yield match[1], int(match[2] or 200)


@pytest.fixture(scope="module")
def engine():
    with Engine(make_tiny_models.HOME / "smollm2") as engine:
        yield engine


def test_every_line_works(engine, tmp_path, monkeypatch):
    model = make_tiny_models.HOME / "smollm2"
    adapter = make_tiny_adapters.write_all(model, ["seven-r8"])["seven-r8"]
    monkeypatch.chdir(tmp_path)
    places = {"127.0.0.1:30000": f"127.0.0.1:{engine.port}", "/path/to/peft-directory": str(adapter), "/path/to/model": str(model)}
    ran = 0
    for kind, block in blocks():
        for word, place in places.items():
            block = block.replace(word, place)
        if kind == "python":
            exec(block, {})
            continue
        for command, expected in commands(block):
            assert command.startswith("curl -s "), command
            done = subprocess.run(["bash", "-c", f"{command} -o answer -w '%{{http_code}}'"], capture_output=True, text=True,
                                  timeout=60)
            answer = pathlib.Path("answer").read_text() if pathlib.Path("answer").exists() else ""
            assert done.stdout == str(expected), f"{command}\n{done.stdout} {done.stderr}\n{answer}"
            ran += 1
    assert ran > 60


def test_every_route_stands_on_the_page(engine):
    curls = "\n".join(block for kind, block in blocks() if kind == "sh")
    table = PAGE.split("## Access")[0]
    for route in engine.get("/server_info").json()["routes"]:
        path, level = route["path"], route["level"]
        name = path + "{id}" if path.endswith("/") else path
        [row] = [row for row in table.splitlines() if row.startswith("|") and f"`{name}`" in row.split("|")[1]]
        assert f"| {level.replace('_optional', '')} |" in row, row
        assert f":30000{path}" in curls, path
