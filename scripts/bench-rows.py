#!/usr/bin/env python3
"""Prints the rows of one JSON file of `kvpack bench --json`, and gathers all files of its folder in results.json.

    bench-rows.py FOLDER FILE       FILE is one of FOLDER/bench-BACKEND-NAME.json; the header is printed with the first

The exit code is 1 if an output was wrong or the process left no JSON.
"""
import json
import pathlib
import sys

HEADER = f"{'backend':<8} {'shape':<18} {'format':<58} {'NMSE':>8} {'int16':>8} {'MB':>9} {'µs':>9} {'GB/s':>7} {'% read':>7} {'× f16':>6}"


def read(path):
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None  # the process did not finish


def number(value, form):
    return "-" if value is None else format(value, form)


def print_rows(backend, shape, steps):
    alone = {row["format"]: row.get("step_us") for row in shape["rows"]}
    for row in shape["rows"]:
        line = f"{backend:<8} {shape['shape']:<18} {row['format'][:58]:<58}"
        if row["outcome"] != "timed":
            print(line, row["outcome"].upper(), row.get("reason", ""))
            continue
        parts = [alone.get(part) for part in row["parts"]] if len(row["parts"]) > 1 else []
        beside = f"  parts alone {sum(parts):.1f} µs" if parts and all(parts) else ""
        in_order = steps.get((backend, shape["shape"].removesuffix("-shuffled"), row["format"]))
        if shape["shape"].endswith("-shuffled") and in_order:
            beside = f"  pages in order {in_order:.1f} µs"
        print(
            f"{line} {number(row['nmse'], '8.0e'):>8} {number(row['nmse_int16'], '.0e'):>8} {row['bytes'] / 1e6:9.1f}"
            f" {row['step_us']:9.1f} {row['gigabytes_per_second']:7.0f} {number(row['percent_of_read'], '.1f'):>7}"
            f" {number(row['times_f16'], '.2f'):>6}{beside}"
        )


def main():
    folder, file = map(pathlib.Path, sys.argv[1:])
    paths = sorted(folder.glob("bench-*.json"), key=lambda path: path.stat().st_mtime)
    reports = [(path, report) for path in paths if (report := read(path)) is not None]
    (folder / "results.json").write_text(json.dumps([report for _, report in reports], indent=1, ensure_ascii=False))
    report = read(file) if file.exists() else None
    if report is None:
        return 1
    if len(reports) == 1:
        print(HEADER)
    backend_of = lambda path: path.name.split("-")[1]
    rows = [(backend_of(path), shape, row) for path, report in reports for shape in report["shapes"] for row in shape["rows"]]
    steps = {(backend, shape["shape"], row["format"]): row.get("step_us") for backend, shape, row in rows}
    for shape in report["shapes"]:
        print_rows(backend_of(file), shape, steps)
    return int(any(row["outcome"] == "wrong" for shape in report["shapes"] for row in shape["rows"]))


if __name__ == "__main__":
    sys.exit(main())
