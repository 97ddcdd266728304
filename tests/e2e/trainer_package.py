"""The Python package as a user has it: installed by pip from this checkout, beside the trainer's own torch and PEFT.

HEADRACE_PYTHON names a folder where it is installed already.
"""

import atexit
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@functools.cache
def folder() -> pathlib.Path:
    if "HEADRACE_PYTHON" in os.environ:
        return pathlib.Path(os.environ["HEADRACE_PYTHON"])
    target = pathlib.Path(tempfile.mkdtemp(prefix="headrace-package-"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(ROOT)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    os.environ["HEADRACE_PYTHON"] = str(target)
    return target


def load():
    """The package, imported from where pip has put it."""
    if str(folder()) not in sys.path:
        sys.path.insert(0, str(folder()))
    import headrace

    assert pathlib.Path(headrace.__file__).is_relative_to(folder())
    return headrace


def environment(**more) -> dict:
    """Of a program that imports the package."""
    return {**os.environ, "PYTHONPATH": f"{folder()}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", **more}
