#!/usr/bin/env bash
# Compares the public interface of the libraries with that of a release, by cargo-semver-checks.
#
#   semver-checks.sh release     prints the newest release: the last tag v* behind this commit. Fails where there is none
#   semver-checks.sh COMMIT      compares with the interface at this commit or tag, and installs the tool if it is missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.51.0
packages=(kvpack-device kvpack-weights kvpack)

case "${1:-}" in
    release)
        git describe --tags --match 'v[0-9]*' --abbrev=0 2>/dev/null
        ;;
    "" | -*)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
    *)
        command -v cargo-semver-checks >/dev/null || cargo install --locked --version "$version" cargo-semver-checks
        for package in "${packages[@]}"; do
            cargo semver-checks --package "$package" --baseline-rev "$1" --all-features
        done
        ;;
esac
