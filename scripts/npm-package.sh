#!/usr/bin/env bash
# Packs the module of the page in target/web (scripts/build-web.sh) for npm, into target/npm: kvpack-VERSION.tgz.
#
# It is not published from here. What npm would refuse, or a file that package.json names and the page lacks, fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | sed -n 1p)
grep -q "\"version\": \"$version\"" web/npm/package.json || {
    echo "npm: web/npm/package.json is not of version $version, as Cargo.toml is" >&2
    exit 1
}
rm -rf target/npm
mkdir -p target/npm
cp web/npm/package.json web/npm/README.md LICENSE-MIT LICENSE-APACHE target/npm
cp target/web/kvpack.js target/web/kvpack.d.ts target/web/kvpack_bg.wasm target/npm
cd target/npm
npm pack --silent
ls -l ./*.tgz | awk '{ printf "npm: %s, %d KB\n", $NF, $5 / 1000 }'
