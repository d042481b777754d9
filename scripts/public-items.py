#!/usr/bin/env python3
"""Counts the public items of the library, module by module, as its documentation shows them.

    public-items.py [JSON]

Without a file it lets rustdoc write its JSON, which stable Rust does where RUSTC_BOOTSTRAP=1 is set. An item that is
exported twice counts once, where its path is shortest. The second number is what belongs to an item: methods, variants
and public fields. Hidden items do not count.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

KINDS = {"struct", "enum", "trait", "function", "constant", "type_alias", "macro", "union", "static"}


def written():
    """The JSON of rustdoc."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    command = ["cargo", "rustdoc", "--locked", "--package", "kvpack", "--lib", "--all-features", "--"]
    command += ["-Z", "unstable-options", "--output-format", "json"]
    subprocess.run(command, check=True, env={**os.environ, "RUSTC_BOOTSTRAP": "1"})
    return target / "doc" / "kvpack.json"


def parts(index, inner, kind):
    """How many public things belong to an item."""
    count = 0
    data = inner[kind]
    if kind == "struct" and "plain" in data.get("kind", {}) if isinstance(data.get("kind"), dict) else False:
        count += sum(str(field) in index for field in data["kind"]["plain"]["fields"])
    if kind == "enum":
        count += sum(str(variant) in index for variant in data["variants"])
    if kind == "trait":
        count += sum(str(item) in index for item in data["items"])
    for block in data.get("impls", []) if kind in ("struct", "enum", "union") else []:
        of = index.get(str(block), {}).get("inner", {}).get("impl")
        if of and of["trait"] is None:
            count += sum(index.get(str(item), {}).get("visibility") == "public" for item in of["items"])
    return count


def main():
    text = json.loads((Path(sys.argv[1]) if len(sys.argv) > 1 else written()).read_text())
    index = text["index"]
    places = {}

    def walk(module, path):
        for child in index[str(module)]["inner"]["module"]["items"]:
            item = index.get(str(child))
            if item is None or item["visibility"] not in ("public", "default"):
                continue
            kind = next(iter(item["inner"]))
            if kind == "use":
                target = item["inner"]["use"]["id"]
                item = index.get(str(target))
                if item is None:
                    continue
                child, kind = target, next(iter(item["inner"]))
            if kind == "module":
                walk(child, [*path, item["name"]])
            elif kind in KINDS:
                places.setdefault(child, []).append((len(path), path, kind))

    walk(text["root"], [])
    items, inside = Counter(), Counter()
    for child, found in places.items():
        _, path, kind = min(found)
        module = path[0] if path else "kvpack"
        items[module] += 1
        inside[module] += parts(index, index[str(child)]["inner"], kind)
    print("| module | items | methods, variants and fields |\n| --- | ---: | ---: |")
    for module in sorted(items):
        print(f"| {module} | {items[module]} | {inside[module]} |")
    print(f"| all | {sum(items.values())} | {sum(inside.values())} |")


if __name__ == "__main__":
    main()
