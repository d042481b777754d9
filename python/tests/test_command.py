"""The command ``kvpack`` of the wheel."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import kvpack
from kvpack import _kvpack

# Next to the interpreter, or where pip put it with --target.
NAMED = shutil.which("kvpack", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
HELD = hasattr(_kvpack, "command")


def run(*arguments):
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120)


def ways():
    """The command by its name and through the module."""
    assert NAMED, "pip put no kvpack on the PATH"
    return [(NAMED,), (sys.executable, "-m", "kvpack")]


@pytest.mark.skipif(HELD, reason="this wheel has the command")
def test_a_wheel_without_the_command_says_so():
    for way in ways():
        done = run(*way, "list")
        assert done.returncode == 2 and "--features command" in done.stderr and not done.stdout


@pytest.mark.skipif(not HELD, reason="NOT RUN: this wheel has no command; run scripts/python.sh release")
def test_the_command_runs(tmp_path):
    for way in ways():
        assert kvpack.__version__ in run(*way, "--version").stdout
        listed = run(*way, "list")
        assert listed.returncode == 0 and "saw-int4" in listed.stdout
        checked = run(*way, "check", "--backend", "cpu", "--kind", "top-k")
        assert checked.returncode == 0 and "passed" in checked.stdout, checked.stdout + checked.stderr
        wrong = run(*way, "lisp")
        assert wrong.returncode == 2 and "lisp" in wrong.stderr
