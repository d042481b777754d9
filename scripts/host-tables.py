#!/usr/bin/env python3
"""Makes the tables of docs/results/hosts/README.md from the JSON files next to it.

    host-tables.py            prints every table
    host-tables.py --check    fails if the page lacks one of them

`candle-host study … --json` writes the files, and `burn-host … --json` those that begin with `burn-`.
"""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs/results/hosts"


def rows_of(*names):
    return [row for name in names for row in json.loads((FOLDER / f"{name}.json").read_text())["rows"]]


def number(x, digits=2):
    return "–" if x is None else f"{x:.{digits}f}"


def table(header, rows):
    left = ("batch × tokens", "recipe", "attention of")
    rule = ["---" if name in left else "---:" for name in header]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def recipes_of(rows):
    return list(dict.fromkeys(row["recipe"] for row in rows))


def rates(names, batches, lengths):
    """Tokens per second by batch and length, a column for each recipe. Names have spaces between them."""
    rows = rows_of(*names.split())
    by = {(row["batch"], row["tokens"], row["recipe"]): row["tokens_per_second"] for row in rows}
    recipes = recipes_of(rows)
    lines = [[f"{b} × {t}", *(number(by.get((b, t, r)), 0) for r in recipes)] for t in lengths for b in batches]
    return table(["batch × tokens", *recipes], lines)


def parts(name, sizes, recipes):
    """What a step is made of. Without a graph of the layers only its time is known."""
    by = {(row["batch"], row["tokens"], row["recipe"]): row for row in rows_of(name)}
    lines = []
    for batch, tokens, recipe in [(b, t, recipe) for b, t in sizes for recipe in recipes]:
        row = by[batch, tokens, recipe]
        step, device, attention = row["step_ms"], row.get("device_ms"), row.get("attention_ms")
        rest, host = (device - attention, step - device) if device else (None, None)
        lines.append([f"{batch} × {tokens}", recipe, number(step), number(attention), number(rest), number(host)])
    return table(["batch × tokens", "attention of", "step ms", "attention", "rest of the model", "host"], lines)


def submitted(names, sizes, recipes):
    """What a step is made of where every layer is submitted by itself: attention is timed alone, the rest is what is left.
    The host is done when all is submitted."""
    by = {(row["batch"], row["tokens"], row["recipe"]): row for row in rows_of(*names.split())}
    lines = []
    for row in (by[b, t, r] for b, t in sizes for r in recipes if (b, t, r) in by):
        step, attention = row["step_ms"], row["attention_ms"]
        rest = step - attention if attention else None
        size = f"{row['batch']} × {row['tokens']}"
        lines.append([size, row["recipe"], *map(number, (step, attention, rest, row["submitted_ms"]))])
    header = ["batch × tokens", "attention of", "step ms", "attention alone", "rest of the step", "submitted after"]
    return table(header, lines)


def throughput(name):
    """Within a budget of memory, relative to the first row."""
    rows = rows_of(name)
    first, lines = rows[0], []
    for row in rows:
        kernels = first["same_batch_ms"] / row["same_batch_ms"]
        decoded = row["decoded_per_second"] / first["decoded_per_second"]
        lines.append([
            row["recipe"], f"{row['bytes_of_request'] / 2**20:.0f}", str(row["batch"]),
            f"{row['tokens_per_second']:.0f}", number(row["tokens_per_second"] / first["tokens_per_second"]),
            f"{row['decoded_per_second']:.0f}", number(decoded), number(kernels), number(decoded / kernels),
        ])  # fmt: skip
    header = ["recipe", "MiB a request", "batch", "tokens/s", "×", "decoded tokens/s", "×", "of kernels", "of the batch"]
    return table(header, lines)


def budgets(name):
    """Budgets one below the other: 1 bit against f16."""
    lines = []
    for first, last in by_budget(name):
        kernels = first["same_batch_ms"] / last["same_batch_ms"]
        decoded = last["decoded_per_second"] / first["decoded_per_second"]
        served = first["tokens_per_second"] and last["tokens_per_second"]
        lines.append([
            gib(first), str(first["batch"]), f"{first['decoded_per_second']:.0f}", str(last["batch"]),
            f"{last['decoded_per_second']:.0f}", number(decoded), number(kernels), number(decoded / kernels),
            number(last["tokens_per_second"] / first["tokens_per_second"] if served else None),
        ])  # fmt: skip
    header = ["cache", "f16 batch", "tokens/s", "1 bit batch", "tokens/s", "×", "of kernels", "of the batch",
              "whole queue ×"]  # fmt: skip
    return table(header, lines)


def by_budget(name):
    """The rows of f16 and of the last recipe under every budget."""
    rows = rows_of(name)
    budgets = dict.fromkeys(row["memory_mib"] for row in rows)
    return [[of for of in rows if of["memory_mib"] == budget][:: len(recipes_of(rows)) - 1] for budget in budgets]


def gib(row):
    return f"{row['memory_mib'] / 1024:.4g} GiB"


def budget_sums(name):
    """What steps under the budgets are made of."""
    lines = []
    for row in (row for pair in by_budget(name) for row in pair):
        step, device, attention = row["step_ms"], row["device_ms"], row["attention_ms"]
        times = map(number, (step, attention, device - attention, step - device))
        lines.append([gib(row), row["recipe"], str(row["batch"]), *times])
    return table(["cache", "recipe", "batch", "step ms", "attention", "rest of the model", "host"], lines)


def policy(name):
    """What keeping fewer tokens costs and brings, and against the host's own attention where that was measured."""
    lines = []
    rows = sorted(rows_of(name), key=lambda row: (row["tokens"], row["batch"]))
    host = "burn" if name.startswith("burn-") else "candle"
    own = {(row["batch"], row["tokens"]): row["end_to_end"] for row in rows if row["recipe"] == host}
    for row in rows:
        of_host = own.get((row["batch"], row["tokens"]))
        lines.append([
            f"{row['batch']} × {row['tokens']}", f"`{row['recipe']}`", number(row["step_ms"]), number(row["attention_ms"]),
            number(row["decode"]), number(row["cache_mib"], 0), number(row["statistics_ms"], 1),
            number(row["compress_ms"], 1), f"{100 * row['overhead']:.1f} %", number(row["end_to_end"]),
            *([number(row["end_to_end"] / of_host if of_host else None)] if own else []),
        ])  # fmt: skip
    header = ["batch × tokens", "recipe", "step ms", "attention", "×", "cache MiB", "statistics ms", "compress ms",
              "overhead", "end to end ×", *([f"against {host} ×"] if own else [])]  # fmt: skip
    return table(header, lines)


def context(name):
    """Time of a step by the length of the context, relative to f16 in parentheses."""
    rows = rows_of(name)
    by = {(row["tokens"], row["recipe"]): f"{row['step_ms']:.2f} ({row['times']:.2f})" for row in rows}
    recipes = recipes_of(rows)
    lengths = sorted({row["tokens"] for row in rows})
    return table(["tokens", *recipes], [[str(t), *(by[t, r] for r in recipes)] for t in lengths])


def tables():
    batches = [1, 8, 64]
    some = ["candle", "f16", "saw-int4", "calibquant:1"]
    yield rates("decode-8b", batches, [1024, 8192, 32768])
    yield parts("decode-8b", [(1, 1024), (8, 32768), (64, 8192)], [*some, "kivi:2"])
    yield rates("decode-8b-w4", batches, [1024, 8192, 32768])
    yield parts("decode-8b-w4", [(1, 1024), (8, 32768), (64, 8192)], [*some, "kivi:2"])
    yield rates("decode-smollm2", batches, [1024, 8000])
    yield parts("decode-smollm2", [(1, 1024), (1, 8000), (8, 8000), (64, 1024), (64, 8000)], some)
    yield rates("decode-qwen", batches, [1024, 8192, 32000])
    yield parts("decode-qwen", [(1, 1024), (1, 32000), (8, 32000), (64, 8192), (64, 32000)], [*some, "kivi:2"])
    yield rates("burn-smollm2-1024 burn-smollm2-8000", [1, 8, 64], [1024, 8000])
    yield submitted("burn-smollm2-1024 burn-smollm2-8000", [(1, 1024), (1, 8000), (64, 8000)], ["burn", *some[1:]])
    yield rates("burn-qwen-8000 burn-qwen-32000", batches, [1024, 8000, 32000])
    yield submitted("burn-qwen-8000 burn-qwen-32000", [(1, 1024), (64, 8000), (64, 32000)], ["burn", *some[1:]])
    yield budgets("burn-throughput-7b-8960")
    yield policy("burn-policy-8b")
    yield context("burn-context-8b")
    yield from (throughput(f"throughput-7b-{budget}") for budget in ("5g", "20g-w4"))
    yield from (budgets(f"throughput-7b-{prompt}") for prompt in ("8960", "8960-20g", "17920", "140gb-w4"))
    yield budget_sums("throughput-7b-8960")
    policies = ("latency-7b", "latency-7b-w4", "latency-7b-32k-w4", "latency-7b-2k-w4", "latency-8b", "lookm-13b")
    yield from (policy(name) for name in policies)
    yield context("context-7b")


def main():
    if sys.argv[1:] != ["--check"]:
        print("\n\n".join(tables()))
        return
    page = (FOLDER / "README.md").read_text()
    missing = [made for made in tables() if made not in page]
    for made in missing:
        print(f"docs/results/hosts/README.md lacks this table; scripts/host-tables.py prints it:\n{made}\n")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
