#!/usr/bin/env python3
"""Plants mistakes in the text of kernels, one at a time, and tells which test finds each.

    plant.py LIST.toml PROGRAMS [NAME ...]

The text of a kernel lies in a test program as it is, so a mistake of no greater length replaces bytes of a copy of the
program, and nothing is built. PROGRAMS is a folder with the programs that the list names: `gpu`, `gpu_conformance`,
`cuda` or `kvpack`, without the hash that cargo adds. Copy them there from target/debug/deps. With NAMEs only mistakes
whose name begins with one of them are planted.

A list has an array `mistake` of tables: `name`, `in` (the file), `what`, `from` and `to` (the text), and `run`, a list
of command lines that begin with the name of a program. A mistake is found when one of them fails. Environment variables
choose driver and path, as in scripts/test.sh. Every command must pass before anything is planted.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

# Seconds of one command: a mistake may let a kernel run for ever.
LIMIT = int(os.environ.get("KVPACK_PLANT_LIMIT", "600"))


def run(programs, command):
    """Whether a command passes, and what it printed."""
    name, *arguments = shlex.split(command)
    try:
        done = subprocess.run([programs / name, *arguments], capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT} s"
    return done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")


def failed_tests(output):
    lines = output.splitlines()
    # libtest and libtest-mimic, or kvpack check.
    names = [line.split()[1] for line in lines if line.startswith("test ") and line.endswith("FAILED")]
    names += [line.split()[0] for line in lines if "FAILED" in line and not line.startswith("test ") and line.split()]
    return ", ".join(dict.fromkeys(names)) or (lines[-1] if lines else "it ended without output")


def check(mistake, programs):
    """Refuses a mistake that cannot be planted."""
    before, after = (mistake[key].encode() for key in ("from", "to"))
    if len(after) > len(before):
        sys.exit(f"{mistake['name']}: the mistake is longer than what it replaces")
    for name in {shlex.split(command)[0] for command in mistake["run"]}:
        found = (programs / name).read_bytes().count(before)
        if found != 1:
            sys.exit(f"{mistake['name']}: {name} has its text {found} times")


def plant(mistake, programs, folder):
    """What found a mistake; None if nothing did."""
    before, after = (mistake[key].encode() for key in ("from", "to"))
    for command in mistake["run"]:
        name = shlex.split(command)[0]
        text = (programs / name).read_bytes()
        program = folder / name
        program.write_bytes(text.replace(before, after.ljust(len(before))))
        program.chmod(0o755)
        passed, output = run(folder, command)
        if not passed:
            return failed_tests(output)
    return None


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    mistakes = tomllib.loads(Path(sys.argv[1]).read_text())["mistake"]
    programs, wanted = Path(sys.argv[2]).resolve(), tuple(sys.argv[3:])
    mistakes = [mistake for mistake in mistakes if not wanted or mistake["name"].startswith(wanted)]
    for mistake in mistakes:
        check(mistake, programs)
    for command in sorted({command for mistake in mistakes for command in mistake["run"]}):
        passed, output = run(programs, command)
        if not passed:
            sys.exit(f"{command} fails without a mistake: {failed_tests(output)}")
    lived = 0
    with tempfile.TemporaryDirectory() as folder:
        for mistake in mistakes:
            found = plant(mistake, programs, Path(folder))
            lived += found is None
            print(f"| {mistake['in']} | {mistake['what']} | {found or 'LIVED'} |", flush=True)
    print(f"{len(mistakes)} planted, {lived} lived")
    sys.exit(lived > 0)


if __name__ == "__main__":
    main()
