#!/usr/bin/env python3
"""Plants mistakes of the kinds that cargo-mutants knows in src/cache, src/plan and src/policy, and tells which lived.

    mutants.py build FOLDER                one build with all mistakes, each behind a switch, and the tests of the CPU
    mutants.py reach FOLDER                runs each test alone and notes which mistakes it reaches
    mutants.py run FOLDER [FIRST LAST]     runs for every mistake the tests that reach it, the shortest first
    mutants.py list FOLDER                 the result: found, lived and not reached, file by file

`build` needs Cargo, the others only FOLDER, which can be carried to a machine with more processors; they run from the
root of the repository. KVPACK_MUTANT_SECONDS is the longest test that `run` takes (30). A test counts as failed when it
takes ten times as long as without a mistake. What ended is kept in FOLDER, and `run` goes on where it was.
"""

import collections
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

# Programs with tests that need no device.
PROGRAMS = {"unit": "--lib", "cpu": "--test=cpu", "conformance": "--test=conformance"}
LONGEST = float(os.environ.get("KVPACK_MUTANT_SECONDS", "30"))
PROCESSORS = int(os.environ.get("KVPACK_MUTANT_JOBS", os.cpu_count()))


def build(folder):
    copy = folder / "sources"
    command = ["cargo", "build", "--locked", "--release", "--manifest-path", "lab/mutants/Cargo.toml",
               "--message-format=json"]
    messages = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    planter = next(json.loads(line)["executable"] for line in messages if '"executable":"/' in line)
    files = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    without, constant = folder / "without.txt", folder / "constant.txt"
    without.touch()
    constant.touch()
    while True:
        shutil.rmtree(copy / "src", ignore_errors=True)
        for file in filter(None, files):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy / file)
        plant = [planter, copy / "src", without, constant]
        planted = subprocess.run(plant, check=True, capture_output=True, text=True).stdout
        (folder / "mistakes.tsv").write_text(planted)
        refused, called = compile_all(copy, folder)
        if not refused and not called:
            break
        print(f"{len(refused)} mistakes do not compile, {len(called)} functions are called while compiling", flush=True)
        with without.open("a") as file:
            file.writelines(f"{number}\n" for number in sorted(refused))
        with constant.open("a") as file:
            file.writelines(f"{name}\n" for name in sorted(called))
    print(f"{len(planted.splitlines())} mistakes are planted, {len(without.read_text().split())} do not compile")


def compile_all(copy, folder):
    """Builds the test programs; the numbers of the mistakes that do not compile, and constant functions."""
    command = ["cargo", "test", "--locked", "--package", "kvpack", "--package", "kvpack-tests",
               "--no-default-features", "--no-run", "--message-format=json", *PROGRAMS.values()]
    done = subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, text=True)
    refused, called, errors = set(), set(), []
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["executable"]:
            name = "unit" if message["target"]["kind"] == ["lib"] else message["target"]["name"]
            if name in PROGRAMS:
                shutil.copy2(message["executable"], folder / name)
        if message["reason"] != "compiler-message" or message["message"]["level"] != "error":
            continue
        message = message["message"]
        errors.append(message["rendered"])
        if message["code"] and message["code"]["code"] == "E0015":
            called.add(constant_function(message["message"]))
            continue
        # The other spans of an error are what it conflicts with, where there may be mistakes that compile.
        primary = [span for span in message["spans"] if span["is_primary"]]
        refused |= numbers_at(copy, primary) or numbers_at(copy, message["spans"])
    if done.returncode != 0 and not refused and not called:
        sys.exit("".join(errors[:10]) or "the sources do not compile")
    return refused, called


def constant_function(message):
    """`Type::function` or `function` of an error that says that a function is not constant."""
    path = message.split("`")[1]
    while "<" in path:
        path = re.sub(r"(::)?<[^<>]*>", "", path)
    parts = [part for part in path.split("::") if part]
    return "::".join(parts[-2:] if "associated" in message or "method" in message else parts[-1:])


def numbers_at(copy, spans):
    """The numbers of the mistakes in the lines of spans, or around them."""
    numbers = set()
    for span in spans:
        lines = (copy / span["file_name"]).read_text().splitlines()
        first = span["line_start"] - 1
        found = [text for text in lines[max(first - 1, 0) : span["line_end"] + 1] if "planted::on(" in text]
        if not found and span["is_primary"]:
            # A value of several lines.
            indent = [len(text) - len(text.lstrip()) for text in lines]
            around = (at for at in range(first, max(first - 12, 0), -1) if indent[at] < indent[first])
            found = [lines[at] for at in around if "if crate::planted::on(" in lines[at]][:1]
        for text in found:
            numbers.update(int(part.split("u32")[0]) for part in text.split("planted::on(")[1:])
    return numbers


def reach(folder):
    """Notes seconds and reached mistakes of every test, which it runs alone."""
    tests = []
    for name in PROGRAMS:
        listed = subprocess.run([folder / name, "--list"], check=True, capture_output=True, text=True).stdout
        tests += [(name, line[: -len(": test")]) for line in listed.splitlines() if line.endswith(": test")]

    def one(test):
        name, test = test
        file = folder / f"reached-{name}-{test.replace(':', '.')}"
        start = time.monotonic()
        done = subprocess.run([folder / name, "--exact", test, "--test-threads=1"], capture_output=True, text=True,
                              env={**os.environ, "KVPACK_REACHED": str(file)})
        seconds = time.monotonic() - start
        reached = [int(number) for number in file.read_text().split()] if file.exists() else []
        file.unlink(missing_ok=True)
        if done.returncode != 0:
            print(f"{test} fails without a mistake and is left out")
            reached = []
        return {"program": name, "test": test, "seconds": seconds, "reached": reached}

    with concurrent.futures.ThreadPoolExecutor(PROCESSORS) as pool:
        found = list(pool.map(one, tests))
    (folder / "reach.json").write_text(json.dumps(found))
    print(f"{len(found)} tests, {sum(test['seconds'] for test in found):.0f} s")


def run(folder, first=0, last=1 << 30):
    tests_of = collections.defaultdict(list)
    for test in sorted(json.loads((folder / "reach.json").read_text()), key=lambda test: test["seconds"]):
        for number in test["reached"]:
            tests_of[number].append(test)
    result = folder / "result.tsv"
    ended = {int(line.split("\t")[0]) for line in result.read_text().splitlines()} if result.exists() else set()
    numbers = [int(line.split("\t")[0]) for line in (folder / "mistakes.tsv").read_text().splitlines()]
    numbers = [number for number in numbers if int(first) <= number < int(last) and number not in ended]

    def one(number):
        left = 0
        for test in tests_of[number]:
            if test["seconds"] > LONGEST:
                left += 1
                continue
            try:
                done = subprocess.run([folder / test["program"], "--exact", test["test"], "--test-threads=1"],
                                      capture_output=True, timeout=10 * test["seconds"] + 5,
                                      env={**os.environ, "KVPACK_PLANTED": str(number),
                                           "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "true"})
                failed = done.returncode != 0
            except subprocess.TimeoutExpired:
                failed = True
            if failed:
                return number, "found", test["test"]
        if not tests_of[number]:
            return number, "not reached", ""
        return number, "lived", f"{len(tests_of[number]) - left} of {len(tests_of[number])} tests"

    with concurrent.futures.ThreadPoolExecutor(PROCESSORS) as pool, result.open("a") as file:
        for done in concurrent.futures.as_completed([pool.submit(one, number) for number in numbers]):
            print(*done.result(), sep="\t", file=file, flush=True)


def show(folder):
    mistakes = {line.split("\t")[0]: line.split("\t")[1:] for line in (folder / "mistakes.tsv").read_text().splitlines()}
    counts = collections.defaultdict(collections.Counter)
    lived = collections.defaultdict(list)
    for line in (folder / "result.tsv").read_text().splitlines():
        number, outcome, by = line.split("\t")
        file, at, function, what = mistakes[number]
        counts[file][outcome] += 1
        if outcome != "found":
            lived[file].append(f"    {at} {function}: {what} ({outcome}{', ' + by if by else ''}) #{number}")
    print("| file | found | lived | not reached |\n| --- | ---: | ---: | ---: |")
    for file in sorted(counts):
        print(f"| {file} | {counts[file]['found']} | {counts[file]['lived']} | {counts[file]['not reached']} |")
    total = sum(counts.values(), collections.Counter())
    print(f"| all | {total['found']} | {total['lived']} | {total['not reached']} |\n")
    for file in sorted(lived):
        print(file, *sorted(lived[file]), sep="\n")


def main():
    doors = {"build": build, "reach": reach, "run": run, "list": show}
    if len(sys.argv) < 3 or sys.argv[1] not in doors:
        sys.exit(__doc__)
    folder = Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    doors[sys.argv[1]](folder, *sys.argv[3:])


if __name__ == "__main__":
    main()
