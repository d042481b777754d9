#!/usr/bin/env bash
# Plants mistakes and records those that no test finds.
#
#   mutants.sh policy [FILE ...]   in src/policy, in a package of the policies alone that compiles in seconds
#   mutants.sh cache [FILE ...]    in src/cache and src/plan, in the whole library: hours
#   mutants.sh list                what lived, of all files with a result
#
# The result of each file stays in target/mutants, so that a run that was ended goes on where it was. A mutant that the
# tests time out on counts as found. The first run installs cargo-mutants.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
results=$root/target/mutants
version=27.1.0
# Seconds that the tests of one mutant may take.
timeout=${KVPACK_MUTANT_TIMEOUT:-300}

# A package of the policies, what they stand on, and their tests.
policies_alone() {
    local package=$results/package
    rm -rf "$package/src" "$package/tests"
    mkdir -p "$package/src/format" "$package/src/plan" "$package/tests"
    cp -r src/policy "$package/src/"
    cp src/counts.rs src/error.rs "$package/src/"
    cp src/format/{heads,key_or_value,shape}.rs "$package/src/format/"
    cp src/plan/rows.rs "$package/src/plan/"
    cp tests/cpu/{policy,policy_examples}.rs "$package/tests/"
    # Documentation names items that are not here.
    cat >"$package/src/lib.rs" <<'RUST'
#![allow(dead_code, unused, rustdoc::all)]
mod counts;
mod error;
pub mod format {
    mod heads;
    mod key_or_value;
    mod shape;
    pub use heads::{HEAD_DIMS, MOST_HEADS};
    pub use key_or_value::KeyOrValue;
    pub use shape::AttentionShape;
}
pub mod plan {
    mod rows;
    pub use rows::*;
    pub use crate::counts::{MOST_LAYERS, MOST_TOKENS};
}
pub mod policy;
pub use error::{Error, Result};
pub use format::AttentionShape;
RUST
    cat >"$package/Cargo.toml" <<'TOML'
[package]
name = "kvpack"
version = "0.0.0"
edition = "2024"
publish = false

[workspace]

[dependencies]
bytemuck = "1"
fastrand = "2"
half = { version = "2", features = ["bytemuck"] }
thiserror = "2"

[dev-dependencies]
proptest = "1"

[profile.dev]
debug = false
TOML
    echo "$package"
}

# Plants the mistakes of one file of a package that have no result yet.
run_file() {
    local package=$1 file=$2 out=$results/${2//\//.}
    shift 2
    [ ! -f "$out/finished" ] || return 0
    rm -rf "$out"
    mkdir -p "$out"
    local status=0
    nice -n 19 cargo mutants --dir "$package" --package kvpack --file "$file" --output "$out" --baseline skip \
        --timeout "$timeout" --build-timeout 1800 --no-times "$@" || status=$?
    # 2 and 3: some lived, or timed out.
    case $status in
        0 | 2 | 3) ;;
        *) return "$status" ;;
    esac
    # A package that does not compile refuses every mistake, and none was tested.
    if [ -s "$out/mutants.out/unviable.txt" ] && ! was_tested "$out/mutants.out"; then
        echo "$file: no mutant compiles, so nothing was tested and the file is not finished" >&2
        return
    fi
    touch "$out/finished"
}

# Whether any mutant of a result was run by the tests.
was_tested() {
    [ -s "$1/caught.txt" ] || [ -s "$1/missed.txt" ] || [ -s "$1/timeout.txt" ]
}

files_of() {
    find "$@" -name '*.rs' | sort
}

[ "${1:-}" = list ] || cargo mutants --version >/dev/null 2>&1 || cargo install cargo-mutants --locked --version "$version"
case "${1:-}" in
    policy)
        shift
        package=$(policies_alone)
        [ $# -gt 0 ] || mapfile -t files < <(files_of src/policy)
        for file in "${@:-${files[@]}}"; do
            # In place, so that what it builds on is built once.
            run_file "$package" "$file" --in-place
        done
        ;;
    cache)
        shift
        [ $# -gt 0 ] || mapfile -t files < <(files_of src/plan src/cache)
        for file in "${@:-${files[@]}}"; do
            # Without wgpu a mutant compiles in a fraction of the time.
            run_file "$root" "$file" --no-default-features --cargo-arg=--locked --cargo-test-arg=--lib --cargo-test-arg=--test=cpu
        done
        ;;
    list)
        for out in "$results"/src.*/; do
            [ -f "$out/finished" ] || continue
            lived=$out/mutants.out/missed.txt
            echo "$(basename "$out"): $(wc -l <"$out/mutants.out/caught.txt") found, $(wc -l <"$lived") lived"
            sed 's/^/    /' "$lived"
        done
        ;;
    *)
        sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 2
        ;;
esac
