#!/usr/bin/env bash
# Runs everything that `make test` checks, and prints a summary. Its last line is "N passed, N failed".
#
# The GPU tests run on two software Vulkan drivers that have little in common: lavapipe (subgroups of 8, f16) and
# SwiftShader (subgroups of 4, no f16, 256 invocations, buffer offsets aligned to 256 bytes). The script first installs
# them if they are missing. The Khronos validation layers watch every run, and any message from them is a failure.
#
#   KVPACK_TEST_DRIVERS   the drivers to test on, "lavapipe swiftshader" on Linux. Name one of them to skip the other,
#                         or "system" for the adapter that wgpu picks by itself (the default elsewhere).
#
# The script sets these for the tests; users do not:
#   KVPACK_TEST_DRIVER    the driver that a run expects: without an adapter of that driver, GPU tests fail
#   KVPACK_PATH           forces a capability path (floor, f16, subgroups, matrices)
#   KVPACK_TEST_BRIEF     skips some cases that the run of all tests on the first driver includes
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
# shellcheck source=scripts/vulkan-drivers.sh
source scripts/vulkan-drivers.sh

if [ "$(uname -s)" = Linux ]; then
    read -ra drivers <<<"${KVPACK_TEST_DRIVERS:-lavapipe swiftshader}"
else
    read -ra drivers <<<"${KVPACK_TEST_DRIVERS:-system}"
fi
[ "${#drivers[@]}" -gt 0 ] || {
    echo "KVPACK_TEST_DRIVERS names no driver" >&2
    exit 2
}
for driver in "${drivers[@]}"; do
    case "$driver" in
        lavapipe | swiftshader | system) ;;
        *)
            echo "KVPACK_TEST_DRIVERS: $driver is not one of lavapipe, swiftshader, system" >&2
            exit 2
            ;;
    esac
done

logs="$PWD/target/test-logs"
rm -rf "$logs"
mkdir -p "$logs"

# --- stages -----------------------------------------------------------------------------------------------------

# A line for every stage that ended: name, seconds, tests passed, tests failed, result.
stages="$logs/stages.tsv"
: >"$stages"

# Runs a command as a stage; its output goes to the terminal and to $logs/<name>.log.
stage() { # name, command...
    local name="$1" log="$logs/$1.log" start=$SECONDS status result=ok
    shift
    printf '\n== %s\n' "$name"
    "$@" </dev/null 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    local ok bad
    read -r ok bad < <(awk '/^test result:/ {
            for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) ok += $(i-1); if ($i ~ /^failed/) bad += $(i-1) }
        } END { print ok + 0, bad + 0 }' "$log")
    if [ "$status" != 0 ] && [ "$bad" = 0 ]; then bad=1; fi # a stage that failed without a failed test counts as one
    if [ "$bad" != 0 ]; then result=FAILED; fi
    if grep -q '^test result:' "$log"; then result="$result, $ok passed, $bad failed"; fi
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" $((SECONDS - start)) "$ok" "$bad" "$result" >>"$stages"
    [ "$bad" = 0 ]
}

# Reports, here and in the summary, a stage that could not run.
not_run() { # name, reason
    printf '\n== %s\nNOT RUN: %s\n' "$1" "$2"
    printf '%s\t0\t0\t0\tNOT RUN: %s\n' "$1" "$2" >>"$stages"
}

summary() {
    printf '\n== summary\n'
    awk -F '\t' -v total="$SECONDS" '
        { printf "%-22s %4d s   %s\n", $1, $2, $5; passed += $3; failed += $4 }
        END {
            printf "%-22s %4d s   logs in target/test-logs\n", "total", total
            print passed + 0, "passed,", failed + 0, "failed"
            exit failed != 0
        }' "$stages"
}

# --- drivers and validation layers ------------------------------------------------------------------------------

set_up_drivers() {
    local driver options=()
    for driver in "${drivers[@]}"; do
        if [ "$driver" != system ]; then options+=("--$driver" --validation); fi
    done
    if [ "${#options[@]}" = 0 ]; then
        echo "testing on this machine's own adapter, nothing to set up"
        return
    fi
    scripts/install-software-vulkan.sh "${options[@]}"
}

# The layer itself prints its messages to the standard output of the test. Test harnesses do not capture that.
#
# The layer is switched on here and not in the tests, so it watches the command line and the examples as well.
# WGPU_DEBUG=0, because wgpu otherwise adds the WGSL source to the SPIR-V, and the layers of Debian 12 do not know
# that language: they would report each shader and check nothing else in it.
cat >"$logs/vk_layer_settings.txt" <<'SETTINGS'
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.log_filename = stdout
khronos_validation.report_flags = error,warn,perf
SETTINGS
validation_message='^(VUID|UNASSIGNED|SYNC|BestPractices|WARNING|ERROR)[-A-Za-z0-9]*\(|Validation (Error|Warning|Performance Warning)'

on() { # driver, command...
    local driver="$1" manifest=
    shift
    case "$driver" in
        lavapipe) manifest=$(lavapipe_manifest) ;;
        swiftshader) manifest=$(swiftshader_manifest) ;;
    esac
    local environment=(KVPACK_TEST_DRIVER="$driver" WGPU_DEBUG=0 VK_LAYER_SETTINGS_PATH="$logs/vk_layer_settings.txt")
    # Loaders before 1.3.207 read VK_ICD_FILENAMES. NODEVICE_SELECT disables a Mesa layer that would look for a
    # display.
    if [ -n "$manifest" ]; then
        environment+=(VK_DRIVER_FILES="$manifest" VK_ICD_FILENAMES="$manifest" WGPU_BACKEND=vulkan NODEVICE_SELECT=1)
    fi
    if [ -n "$(validation_layer)" ]; then environment+=(VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation); fi
    env "${environment[@]}" "$@"
}

# Breaks a rule of Vulkan on purpose. Zero messages elsewhere mean something only if this message is seen.
validation_is_on() { # driver
    local log="$logs/provoked-$1.txt" name
    case "$1" in
        lavapipe) name=llvmpipe ;;
        swiftshader) name=SwiftShader ;;
        system) name= ;;
    esac
    # --workspace, because with fewer crates cargo would unify other features and rebuild everything.
    on "$1" cargo test --locked --workspace --test gpu -- \
        --ignored --nocapture --exact validation::a_broken_rule_is_reported >"$log" 2>&1 || {
        cat "$log"
        return 1
    }
    grep -h '^adapter: ' "$log"
    if ! grep -q "^adapter: .*$name" "$log"; then
        echo "the tests did not run on $1"
        return 1
    fi
    if ! grep -qE "$validation_message" "$log"; then
        [ -z "$(validation_layer)" ] && [ "$1" = system ] && {
            echo "the Khronos validation layers are not installed: this run is not watched"
            return
        }
        cat "$log"
        echo "a broken rule of Vulkan was not reported: the validation layers are not watching"
        return 1
    fi
    echo "the validation layers watch: a rule broken on purpose was reported"
}

# Messages about burn's own kernels are not counted.
no_validation_messages() {
    local found
    found=$(cd "$logs" && grep -H -E --exclude=host-burn.log "$validation_message" -- *.log)
    if [ -z "$found" ]; then
        echo "zero messages"
        return
    fi
    printf '%s\n' "$found" | cut -c1-400 | head -n 20
    echo "$(printf '%s\n' "$found" | wc -l) messages of the validation layers"
    return 1
}

# Checks each set of the library's features alone. A workspace build unifies features, which hides what one set lacks.
# The last set is kvpack together with a crate that makes cudarc link CUDA's libraries instead of loading them, as
# candle's feature `cuda` does. Checking links nothing, so it needs no toolkit.
every_feature_set() {
    local features
    for features in "" wgpu cuda wgpu,cuda cuda,cudarc/dynamic-linking; do
        echo "features: ${features:-none}"
        cargo clippy --locked --package kvpack --no-default-features --features "$features" -- -D warnings || return
    done
}

# A test (cli/tests/cli/rust_version.rs) compares the rust-version of every crate in Cargo.lock with ours. If a compiler
# of that version is installed, it has the last word.
promised_compiler() {
    local version
    version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! cargo "+$version" --version >/dev/null 2>&1; then
        echo "no toolchain $version is installed (rustup toolchain install $version): only the metadata of crates are compared"
        return
    fi
    cargo "+$version" check --locked --workspace --all-features --target-dir target/rust-version
}

# --- what is checked --------------------------------------------------------------------------------------------

stage drivers set_up_drivers || { summary; exit 1; }
if scripts/supply-chain.sh install >"$logs/cargo-deny.log" 2>&1 </dev/null; then
    stage supply-chain scripts/supply-chain.sh check
else
    not_run supply-chain "cargo-deny cannot be installed here, see target/test-logs/cargo-deny.log"
fi
not_run semver-checks "no version of kvpack is published yet, so there is nothing to compare the public interface with"
stage fmt cargo fmt --all --check
stage clippy cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
stage features every_feature_set
stage build cargo test --locked --workspace --no-run || { summary; exit 1; }

first="${drivers[0]}"
if [ "$(uname -s)" = Linux ]; then
    for driver in "${drivers[@]}"; do
        stage "validation-on-$driver" validation_is_on "$driver"
    done
fi
# The page tables of a cache do not depend on the driver or the path, so the thousand operations of `gpu cache::` run only
# with all tests. The tests named here run kernels, steps and edge cases of caches.
kernels=(kernels:: select:: query_runs::)
steps=(model_step:: non_finite_queries:: mixture:: compress:: cache_edges::)
other_drivers_and_paths() {
    local driver
    for driver in "${drivers[@]:1}"; do
        stage "conformance-$driver" on "$driver" cargo test --locked --workspace --test gpu_conformance
        # The skipped test runs nothing on the device, so the first driver suffices.
        stage "gpu-$driver" on "$driver" env KVPACK_TEST_BRIEF=1 cargo test --locked --workspace --test gpu -- \
            "${kernels[@]}" "${steps[@]}" --skip no_kernel_is_compiled_while_serving
    done
    # The best path that is left without wgpu's extensions to WebGPU.
    stage gpu-strict-webgpu on "$first" env KVPACK_TEST_BRIEF=1 WGPU_STRICT_WEBGPU_COMPLIANCE=1 \
        cargo test --locked --workspace --test gpu -- "${kernels[@]}"
    # With the checks that wgpu inserts (not the default) and the limits of a browser. Only this stage uses these
    # shaders, and compiling them takes most of its time, so it runs only the path that every adapter has.
    stage gpu-safe-checks on "$first" env KVPACK_CHECKS=safe KVPACK_PATH=floor WGPU_STRICT_WEBGPU_COMPLIANCE=1 \
        cargo test --locked --workspace --no-fail-fast --test gpu_conformance
    # All tests include the conformance cases of that path.
    stage gpu-floor on "$first" env KVPACK_PATH=floor cargo test --locked --workspace --test gpu -- "${kernels[@]}"
    # The example compares itself with the CPU. Building the tests builds it too.
    stage example on "$first" "${CARGO_TARGET_DIR:-target}/debug/examples/engine_integration"
    host_burn
}
# A burn program in a workspace of its own. Compiling takes most of its time, so it runs where this lane ends before all
# tests do.
host_burn() {
    if printf '%s\n' 1.95 "$(rustc --version | cut -d ' ' -f 2)" | sort -V -C; then
        stage host-burn on "$first" env -u VK_INSTANCE_LAYERS \
            cargo run --locked --manifest-path hosts/burn/Cargo.toml --target-dir target/hosts/burn
    else
        not_run host-burn "burn needs Rust 1.95: see hosts/burn/README.md"
    fi
}
# Runs while all tests run: a software driver compiles shaders one after the other, so one process leaves half of the
# processors idle. Its output is printed when it ends.
other_drivers_and_paths >"$logs/other-drivers-and-paths.txt" 2>&1 &
stage "tests-$first" on "$first" cargo test --locked --workspace --no-fail-fast
wait
cat "$logs/other-drivers-and-paths.txt"
stage validation-messages no_validation_messages
if [ "$(uname -s)" = Linux ]; then
    if scripts/test-web.sh tools >"$logs/web-tools.log" 2>&1 </dev/null; then
        stage web-tint scripts/test-web.sh tint
        stage web-report scripts/test-web.sh report
        if scripts/wasm-cargo.sh --how >"$logs/web-wasm.log" 2>&1 </dev/null; then
            stage web-build scripts/test-web.sh build && stage web-page scripts/test-web.sh page
        else
            not_run web-page "there is no way to wasm here, see target/test-logs/web-wasm.log"
        fi
    else
        not_run web "Node.js, Chromium or npm packages cannot be installed here, see target/test-logs/web-tools.log"
    fi
fi
stage rust-version promised_compiler
stage docs env RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --all-features

summary
