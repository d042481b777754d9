#!/usr/bin/env bash
# Runs cargo for the target wasm32-unknown-unknown: wasm-cargo.sh build -p kvpack-web ...
#
# This script alone decides where the target's standard library comes from:
#   1. the toolchain has it already;
#   2. rustup fetches it;
#   3. if rustup cannot (there is no rustup, or its server is out of reach), cargo's -Z build-std builds it from Debian's
#      sources of the same release (package rust-src, unpacked under target/rust-src). Sources of another release do
#      not compile. Nothing is installed, and the toolchain does not change.
# If none of them works, the script reports that and exits with 3.
#
#   wasm-cargo.sh --how      prints which of them applies, and prepares it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/apt-apart.sh
source scripts/apt-apart.sh

target=wasm32-unknown-unknown
sources="$PWD/target/rust-src"
say() { printf 'wasm: %s\n' "$*" >&2; }

sysroot=$(rustc --print sysroot)
release=$(rustc --version | sed -n 's/^rustc \([0-9][0-9.]*\).*/\1/p')

# --- Debian's sources -------------------------------------------------------------------------------------------

# Suites that may have the release of this toolchain.
suites=(trixie-backports sid)

unpack_sources() {
    local apt="$sources/apt" suite version work
    for suite in "${suites[@]}"; do
        apart_suite "$apt" "$suite" || return 1
        apart "$apt" apt-get update -qq >/dev/null 2>&1 || continue
        version=$(apart "$apt" apt-cache madison rust-src | awk -v r="$release" '$3 ~ "^"r"[+-]" { print $3; exit }')
        [ -n "$version" ] || continue
        say "unpacking the sources of the standard library $release from Debian's rust-src $version"
        work=$(mktemp -d "$sources/unpack.XXXXXX")
        (cd "$work" && apart "$apt" apt-get download -qq "rust-src=$version" >&2) || continue
        dpkg-deb --fsys-tarfile "$work"/rust-src_*.deb | tar -x -C "$work" "./usr/src/rustc-$release/library"
        mv "$work/usr/src/rustc-$release" "$sources/$release"
        rm -rf "$work"
        return 0
    done
    return 1
}

# Makes a copy of this toolchain's sysroot by links, with the sources in their place: cargo looks for them nowhere else.
link_sysroot() {
    local here="$sources/sysroot-$release" entry
    rm -rf "$here"
    mkdir -p "$here/lib/rustlib/src/rust"
    for entry in "$sysroot"/*; do [ "${entry##*/}" = lib ] || ln -s "$entry" "$here/"; done
    for entry in "$sysroot"/lib/*; do [ "${entry##*/}" = rustlib ] || ln -s "$entry" "$here/lib/"; done
    for entry in "$sysroot"/lib/rustlib/*; do [ "${entry##*/}" = src ] || ln -s "$entry" "$here/lib/rustlib/"; done
    ln -s "$sources/$release/library" "$here/lib/rustlib/src/rust/library"
    printf '#!/bin/sh\nexec "%s" --sysroot "%s" "$@"\n' "$(rustup which rustc 2>/dev/null || command -v rustc)" "$here" \
        >"$sources/rustc-$release"
    chmod +x "$sources/rustc-$release"
}

# --- the choice -------------------------------------------------------------------------------------------------

has_target() { [ -d "$sysroot/lib/rustlib/$target/lib" ]; }

build_std=()
if has_target; then
    say "this toolchain has $target"
elif command -v rustup >/dev/null && rustup target add "$target" >/dev/null 2>&1 && has_target; then
    say "rustup added $target"
elif [ -d "$sources/$release/library" ] || unpack_sources; then
    link_sysroot
    say "building the standard library from Debian's sources of $release"
    export RUSTC="$sources/rustc-$release" RUSTC_BOOTSTRAP=1
    build_std=(-Z "build-std=std,panic_abort")
else
    say "there is no way to the target $target: this toolchain ($release) lacks it, rustup could not add it, and Debian's"
    say "package rust-src of the same release could not be fetched. Run where you can: rustup target add $target"
    exit 3
fi
if [ "${1:-}" = --how ]; then exit 0; fi

command="$1"
shift
# It needs a folder of its own: in a shared folder, each change of the sysroot would rebuild everything.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target/wasm}"
exec "${CARGO:-cargo}" "$command" "${build_std[@]}" --target "$target" "$@"
