#!/usr/bin/env bash
# The packages that are published, as a registry would get them: each is packed, unpacked elsewhere, and checked there
# with the others as its only neighbours, so that a file outside its folder or a path without a version fails.
#
# `cargo publish --dry-run` does the same and compiles instead of checking, which takes minutes:
#
#   packages.sh              packs and checks, as CI does
#   packages.sh dry-run      cargo publish --dry-run of all, in the order of their dependencies
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(kvpack-device kvpack kvpack-report kvpack-weights kvpack-cli)
chosen=()
for package in "${packages[@]}"; do chosen+=(-p "$package"); done

case "${1:-}" in
    '') ;;
    dry-run) exec "${CARGO:-cargo}" publish --dry-run --locked "${chosen[@]}" ;;
    *)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac

target="${CARGO_TARGET_DIR:-$PWD/target}"
# A checkout with changes can be checked, but not published.
"${CARGO:-cargo}" package --locked --allow-dirty --no-verify "${chosen[@]}"

apart="$target/packages"
rm -rf "$apart"
mkdir -p "$apart"
{
    printf '[workspace]\nresolver = "3"\nmembers = ["*-[0-9]*"]\n\n[patch.crates-io]\n'
    for package in "${packages[@]}"; do
        archive=$(ls -t "$target/package/$package"-[0-9]*.crate | sed -n 1p)
        # With the time of now: cargo stores one time in all archives, and would take a changed file for a known one.
        tar -x -m -f "$archive" -C "$apart"
        name=$(basename "$archive" .crate)
        printf '%s = { path = "%s" }\n' "$package" "$name"
    done
    # The profile of the workspace: what it checked of other crates is found again.
    printf '\n'
    sed -n '/^\[profile.dev\]/,/^$/p' Cargo.toml
} >"$apart/Cargo.toml"
cp Cargo.lock "$apart"
"${CARGO:-cargo}" check --offline --workspace --manifest-path "$apart/Cargo.toml" --target-dir "$target"
for package in "${packages[@]}"; do
    find "$target/package" -maxdepth 1 -name "$package-[0-9]*.crate" -printf '%f: %k KiB compressed\n'
done
