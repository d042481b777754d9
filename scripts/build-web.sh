#!/usr/bin/env bash
# Builds the browser page into target/web and prints its size: build-web.sh [PROFILE]
#
# PROFILE: web (the published page, and the default) or web-test (larger and slower, but built much faster).
# Exits with 3 if wasm cannot be built here (see wasm-cargo.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile="${1:-web}"
scripts/wasm-cargo.sh build --locked -p kvpack-web --profile "$profile"
"${CARGO:-cargo}" build --locked --workspace --bin kvpack-web-build
rm -rf target/web
mkdir -p target/web
target/debug/kvpack-web-build "target/wasm/wasm32-unknown-unknown/$profile/kvpack_web.wasm" target/web
for file in kvpack_bg.wasm kvpack.js page.js; do
    printf '%-16s %5d KB, %4d KB compressed\n' "$file" "$(($(wc -c <"target/web/$file") / 1000))" \
        "$(($(gzip -9 -c "target/web/$file" | wc -c) / 1000))"
done
