"""A C program of somebody else: built against what `meson install` puts down, by the line in README, and run."""

import os
import pathlib
import subprocess

import pytest

from tools.engine import BINARY, ROOT, Engine


def run(*words, code=0, **environment):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120,
                          env=os.environ | environment)
    assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The root of an installation, and pkg-config's environment for it."""
    root = tmp_path_factory.mktemp("root")
    meson = next(name for name in ("/usr/bin/meson", "meson") if "/" not in name or pathlib.Path(name).exists())
    run(meson, "install", "-C", BINARY.parents[2], "--no-rebuild", "--destdir", root)
    pc, = root.rglob("headrace.pc")
    return root, {"PKG_CONFIG_PATH": str(pc.parent), "PKG_CONFIG_SYSROOT_DIR": str(root)}


def test_the_example_publishes_an_adapter(installed, tiny_dir, tmp_path):
    root, environment = installed
    flags = run("pkg-config", "--cflags", "--libs", "headrace", **environment)[0].split()
    program, library = tmp_path / "push", next(root.rglob("libheadrace.so")).parent
    run("cc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", ROOT / "examples/push.c", *flags, "-o", program)
    with Engine(tiny_dir, skip_tokenizer=True) as engine:
        said, _ = run(program, engine.url, 64, 64, LD_LIBRARY_PATH=str(library))
        assert '"published":"all"' in said and '"weight_version":"step-1"' in said
        base, mine = (engine.score([[5, 17, 40]], name)[0].prompt for name in (None, "mine"))
        assert mine != base
    _, said = run(program, engine.url, 64, 64, code=1, LD_LIBRARY_PATH=str(library))
    assert said.startswith("ERR_PEER: engine ") and engine.url in said
