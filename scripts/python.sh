#!/usr/bin/env bash
# The Python wheel: builds it, checks its size, installs it into an environment of its own and runs its tests.
#
#   python.sh tools    whether Python and the packages are there; says what is missing
#   python.sh          all of it, in a debug build of the CPU backend, without the command
#   python.sh release  the same, optimised, of what a user gets: the command and CUDA as well
#   python.sh lint     the style of the Python files, and whether the stubs are those of the module
#   python.sh sdist    builds a debug wheel from the source archive, as pip does where it finds no wheel
#   python.sh hf       the tests of kvpack.hf as well: PyTorch and transformers, gigabytes of downloads
#
#   KVPACK_PYTHON      the interpreter, python3 if it is not set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target="${CARGO_TARGET_DIR:-$PWD/target}/python"
most=$((15 * 1024 * 1024))

# An environment with the packages that are needed.
environment() { # name, packages...
    local folder="$target/$1"
    shift
    [ -x "$folder/bin/python" ] || "${KVPACK_PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -c 'import sys; assert sys.version_info >= (3, 10), "kvpack needs Python 3.10"'
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

tools() {
    mkdir -p "$target"
    environment tools 'maturin>=1.7,<2' numpy pytest 'ruff>=0.12,<1' 'mypy>=1.17,<3'
}

# The style of the Python files, and whether the stubs say what the installed module has.
lint() {
    local folder="$PWD/python"
    "$target/tools/bin/ruff" check --quiet --no-cache python
    (cd "$target" && "$target/tools/bin/python" -m mypy.stubtest kvpack \
        --mypy-config-file "$folder/pyproject.toml" --allowlist "$folder/tests/stubs-allowed.txt")
}

# The wheel from the source archive, alone in a folder, and what pip says where there is no Rust.
sdist() {
    local folder="$target/sdist" archive said
    rm -rf "$folder"
    "$target/tools/bin/maturin" sdist --manifest-path python/Cargo.toml --out "$folder"
    archive=("$folder"/kvpack-*.tar.gz)
    echo "$(basename "${archive[0]}"): $(wc -c <"${archive[0]}") bytes"
    if said=$(PATH="$target/tools/bin:/usr/bin:/bin" HOME="$folder" MATURIN_NO_INSTALL_RUST=1 \
        "$target/tools/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$folder" \
        "${archive[0]}" 2>&1); then
        echo "NOT RUN: what pip says without Rust; cargo is in /usr/bin or /bin"
    elif [[ "$said" != *[Rr]ust* ]]; then
        printf 'pip does not say that Rust is missing:\n%s\n' "$said"
        return 1
    fi
    PATH="$target/tools/bin:$PATH" CARGO_TARGET_DIR="$target" "$target/tools/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --config-settings 'build-args=--profile dev --no-default-features' -w "$folder" "${archive[0]}"
    ls "$folder"/kvpack-*.whl
}

wheel() { # profile, cargo's options...
    local wheels="$target/wheels" profile="$1" found size
    shift
    rm -rf "$wheels"
    "$target/tools/bin/maturin" build --quiet --locked --profile "$profile" "$@" --manifest-path python/Cargo.toml \
        --target-dir "$target" --out "$wheels" --interpreter "$target/tools/bin/python"
    found=("$wheels"/kvpack-*.whl)
    size=$(wc -c <"${found[0]}")
    echo "$(basename "${found[0]}"): $size bytes"
    if [ "$size" -gt "$most" ]; then
        echo "the wheel has $size bytes; it may have $most"
        return 1
    fi
}

# Runs tests on the installed wheel. The last line has the form of cargo's, which scripts/test.sh counts.
tests() { # environment, pytest's arguments...
    local python="$target/$1/bin/python" log="$target/$1.log" status=0
    shift
    "$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps \
        "$target"/wheels/kvpack-*.whl
    # From the folder of the tests, so that the installed module is imported and not the folder `kvpack`.
    (cd python/tests && "$python" -m pytest -q -rs -p no:cacheprovider "$@") 2>&1 | tee "$log" || status=$?
    local count
    count() { grep -oE "[0-9]+ $1" "$log" | tail -n 1 | cut -d ' ' -f 1; }
    local passed failed
    passed=$(count passed || true)
    failed=$(count 'failed|[0-9]+ error' || true)
    echo "test result: ${passed:-0} passed; ${failed:-0} failed"
    return "$status"
}

case "${1:-all}" in
    tools) tools ;;
    all | release)
        tools
        if [ "${1:-all}" = release ]; then wheel release; else wheel dev --no-default-features; fi
        tests tools --ignore=test_hf.py --ignore=test_cuda.py --ignore=test_cuda_hf.py
        lint
        ;;
    lint)
        tools
        [ -x "$target/tools/bin/kvpack" ] || { wheel dev --no-default-features && tests tools test_command.py; }
        lint
        ;;
    sdist)
        tools
        sdist
        ;;
    hf)
        tools
        environment hf numpy pytest torch transformers
        wheel release
        tests hf test_hf.py test_ops.py test_dataloader.py
        ;;
    *)
        echo "usage: scripts/python.sh [tools | release | lint | sdist | hf]" >&2
        exit 2
        ;;
esac
