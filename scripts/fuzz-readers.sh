#!/usr/bin/env bash
# Changed inputs through the readers of recipes, dumps, weights, models and golden files, on stable Rust.
#
#   fuzz-readers.sh [INPUTS [SEED]]    10,000,000 inputs in all unless it says otherwise
#
# Nine tenths go to the readers of recipes, dumps and weights, which take microseconds. Golden files are computed with, and models
# take a forward pass. What is found lies in target/fuzz. fuzz/README.md keeps the figures of the last run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

inputs=${1:-10000000}
seed=${2:-1}
# Memory that an input could ask for without a limit.
ulimit -v 8000000

# A number that wraps is found as a panic. These builds lie apart from those of others.
export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true
export CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true
folder=target/fuzz-build
cargo build --locked --release --target-dir "$folder" --package kvpack-fuzz --bin fuzz-readers
failed=0
for share in recipe:50 dump:30 weights:10 model:5 golden:5; do
    "$folder/release/fuzz-readers" "${share%:*}" $((inputs * ${share#*:} / 100)) "$seed" || failed=1
done
exit "$failed"
