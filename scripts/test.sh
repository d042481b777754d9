#!/usr/bin/env bash
# Runs everything that `make test` checks, and prints a summary. Its last line is "N passed, N failed".
#
# The GPU tests run on two software Vulkan drivers that have little in common: lavapipe (subgroups of 8, f16) and
# SwiftShader (subgroups of 4, no f16, 256 invocations, buffer offsets aligned to 256 bytes). The script first installs
# them if they are missing. The Khronos validation layers watch every run, and any message from them is a failure.
#
#   KVPACK_TEST_DRIVERS   the drivers to test on, "lavapipe swiftshader" on Linux. Name one of them to skip the other,
#                         or "system" for the adapter that wgpu picks by itself (the default elsewhere).
#   KVPACK_MUST_RUN       stages that have to run: "python web". Where a tool is missing, others are skipped.
#
# The script sets these for the tests; users do not:
#   KVPACK_TEST_DRIVER    the driver that a run expects: without an adapter of that driver, GPU tests fail
#   KVPACK_PATH           forces a capability path (floor, f16, subgroups, matrices)
#   KVPACK_TEST_BRIEF     skips some cases that other stages have
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

# wgpu keeps a backtrace of every lock that it takes where backtraces of errors are asked for. Panics keep theirs.
export RUST_LIB_BACKTRACE=0

logs="$PWD/target/test-logs"
rm -rf "$logs"
mkdir -p "$logs"

# --- stages -----------------------------------------------------------------------------------------------------

# A line for every stage that ended: name, seconds, CPU seconds, tests passed, tests failed, result.
stages="$logs/stages.tsv"
: >"$stages"

# Runs a command as a stage. Its output goes to $logs/<name>.log, and to the terminal when it has ended: stages run side
# by side.
stage() { # name, command...
    local name="$1" log="$logs/$1.log" start=$SECONDS status result=ok TIMEFORMAT='%U %S' cpu
    shift
    printf '\n== %s begins\n' "$name"
    cpu=$({ time "$@" </dev/null >"$log" 2>&1; } 2>&1; exit $?)
    status=$?
    cpu=$(awk '{ print int($1 + $2 + 0.5) }' <<<"$cpu")
    local ok bad
    read -r ok bad < <(awk '/^test result:/ {
            for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) ok += $(i-1); if ($i ~ /^failed/) bad += $(i-1) }
        } END { print ok + 0, bad + 0 }' "$log")
    if [ "$status" != 0 ] && [ "$bad" = 0 ]; then bad=1; fi # a stage that failed without a failed test counts as one
    # A filter that matches no test checks nothing.
    if grep -q '^test result:' "$log" && [ "$ok" = 0 ] && [ "$bad" = 0 ]; then bad=1; fi
    if [ "$bad" != 0 ]; then result=FAILED; fi
    if grep -q '^test result:' "$log"; then result="$result, $ok passed, $bad failed"; fi
    printf '\n== %s\n%s\n%s ended: %s\n' "$name" "$(cat "$log")" "$name" "$result"
    printf '%s\t%s\t%s\t%s\t%s\t%s\n' "$name" $((SECONDS - start)) "$cpu" "$ok" "$bad" "$result" >>"$stages"
    [ "$bad" = 0 ]
}

# Reports, here and in the summary, a stage that could not run. It is a failure where it has to.
not_run() { # name, reason
    local bad=0
    case " ${KVPACK_MUST_RUN:-} " in *" $1 "*) bad=1 ;; esac
    printf '\n== %s\nNOT RUN: %s\n' "$1" "$2"
    printf '%s\t0\t0\t0\t%s\tNOT RUN: %s\n' "$1" "$bad" "$2" >>"$stages"
}

summary() {
    printf '\n== summary\n'
    awk -F '\t' -v total="$SECONDS" '
        { printf "%-22s %4d s %4d CPU s   %s\n", $1, $2, $3, $6; cpu += $3; passed += $4; failed += $5 }
        END {
            printf "%-22s %4d s %4d CPU s   logs in target/test-logs\n", "total", total, cpu
            print passed + 0, "passed,", failed + 0, "failed"
            exit failed != 0
        }' "$stages"
}

# Runs functions, three at a time, in the given order. Drivers compile shaders one after the other, which takes most of
# the time of a stage: two stages leave processors idle, three leave two of them none.
three_at_a_time() { # functions...
    local turns="$logs/turns" worker
    mkdir -p "$turns"
    for worker in 1 2 3; do
        for job in "$@"; do
            # Whoever makes the folder has the turn.
            if mkdir "$turns/$job" 2>/dev/null; then "$job"; fi
        done &
    done
    wait
}

# --- test programs ----------------------------------------------------------------------------------------------

# A line for every test program of the workspace: name, folder of its package, executable. They are run without cargo,
# which would wait for whatever else cargo builds meanwhile.
programs="$logs/programs.tsv"

# Without names of targets: `--example` would build an example as a test program, and not as what the stages run.
build() {
    local messages="$logs/build.json"
    cargo test --locked --workspace --no-run --message-format=json-render-diagnostics >"$messages" || return
    # Unit tests are named after their crate, and a program of the same name as a library has "-bin" behind it.
    sed -n -e '/"profile":{[^}]*"test":true}/!d' -e 's/"kind":\["bin"\]\(.*\)"name":"\([^"]*\)"/\1"name":"\2-bin"/' \
        -e 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\2\t\1\t\3/p' \
        "$messages" | sort >"$programs"
    cut -f 1 "$programs"
    [ -s "$programs" ]
}

# Runs a test program in the folder of its package, as cargo does.
program() { # name, arguments...
    local found folder executable
    found=$(awk -F '\t' -v name="$1" '$1 == name { print $2 "\t" $3 }' "$programs")
    IFS=$'\t' read -r folder executable <<<"$found"
    shift
    [ -n "$executable" ] || {
        echo "there is no such test program"
        return 1
    }
    (cd "$folder" && CARGO_MANIFEST_DIR="$folder" "$executable" "$@")
}

# Runs every program but those named, to the end; fails if one of them failed.
programs_but() { # names...
    local name failed=0
    while read -r name; do
        case " $* " in *" $name "*) continue ;; esac
        echo "-- $name"
        program "$name" </dev/null || failed=1
    done < <(cut -f 1 "$programs")
    return "$failed"
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

# In a shell of its own, so that commands may be functions.
on() ( # driver, command...
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
    export "${environment[@]}"
    "$@"
)

# Breaks a rule of Vulkan on purpose. Zero messages elsewhere mean something only if this message is seen.
validation_is_on() { # driver
    local log="$logs/provoked-$1.txt" name
    case "$1" in
        lavapipe) name=llvmpipe ;;
        swiftshader) name=SwiftShader ;;
        system) name= ;;
    esac
    on "$1" program gpu --ignored --nocapture --exact validation::a_broken_rule_is_reported >"$log" 2>&1 || {
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

# Checks each feature of the library, and with it that of the device layer and of the weights, which have the same
# ones. A workspace build unifies features, which hides what one of them lacks. The last set is kvpack together with a
# crate that makes cudarc link CUDA's libraries instead of loading them, as candle's feature `cuda` does, and NCCL, which
# kvpack loads itself. Checking links nothing, so it needs no toolkit. The stage clippy checks all features together.
# The default one is what a contributor tests first: its unit tests are checked, too. The command without CUDA and the
# Python module with it are built by nothing else here.
every_feature_set() {
    local features weights targets
    for features in "" wgpu cuda nccl,cudarc/dynamic-linking; do
        echo "features: ${features:-none}"
        case "$features" in nccl*) weights=() ;; *) weights=(--package kvpack-weights) ;; esac
        case "$features" in wgpu) targets=(--lib --tests) ;; *) targets=(--lib) ;; esac
        cargo clippy --locked --package kvpack "${weights[@]}" "${targets[@]}" --no-default-features \
            --features "$features" -- -D warnings || return
    done
    echo "the command without CUDA"
    cargo clippy --locked --package kvpack-cli --no-default-features -- -D warnings || return
    echo "the Python module with CUDA"
    cargo clippy --locked --manifest-path python/Cargo.toml --target-dir "${CARGO_TARGET_DIR:-target}" \
        --no-default-features --features cuda -- -D warnings
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
if release=$(scripts/semver-checks.sh release); then
    stage semver-checks scripts/semver-checks.sh "$release"
else
    not_run semver-checks "no commit has the tag of a release, v*, so there is nothing to compare the public interface with"
fi
stage fmt cargo fmt --all --check
if command -v python3 >/dev/null; then
    stage host-tables python3 scripts/host-tables.py --check
else
    not_run host-tables "python3 is not installed"
fi
first="${drivers[0]}"

# A burn program in a workspace of its own. Compiling takes most of its time.
host_burn() {
    if printf '%s\n' 1.95 "$(rustc --version | cut -d ' ' -f 2)" | sort -V -C; then
        stage host-burn on "$first" env -u VK_INSTANCE_LAYERS \
            cargo run --locked --manifest-path hosts/burn/Cargo.toml --target-dir target/hosts/burn
    else
        not_run host-burn "burn needs Rust 1.95: see hosts/burn/README.md"
    fi
}

# It shares nothing with the build, which does not keep two processors busy.
host_burn &
stage build build || { wait; summary; exit 1; }

if [ "$(uname -s)" = Linux ]; then
    for driver in "${drivers[@]}"; do
        stage "validation-on-$driver" validation_is_on "$driver"
    done
fi

# The page tables of a cache do not depend on the driver or the path, so the thousand operations of `gpu cache::` run
# only on the first driver. The tests named here run kernels, steps and edge cases of caches.
kernels=(kernels:: select:: query_runs::)
steps=(model_step:: non_finite_queries:: mixture:: compress:: cache_edges::)
# What these show is the host's work, and their kernels are those of other tests: the first driver suffices.
of_the_host=(--skip no_kernel_is_compiled_while_serving --skip steps_of_others_are_refused
    --skip a_device_without_room_is_survived --skip what_grows_is_compressed_again
    --skip steps_are_bound_once_and_only_encoded --skip every_query_sees_what_it_should)

# Every program and every test of it, on the first driver.
gpu_tests() {
    stage "gpu-$first" on "$first" program gpu --skip devices::
    # A hundred devices come and go in a process of their own: a driver that does not survive it fails by its name.
    stage "devices-$first" on "$first" program gpu devices::
}
# The floor's cases run in the stage of the checks that wgpu inserts.
gpu_conformance() { stage "conformance-$first" on "$first" program gpu_conformance --skip floor::; }
cpu_conformance() { stage conformance-cpu program conformance; }
other_programs() { stage tests on "$first" programs_but gpu gpu_conformance conformance; }

# The other drivers, and the first on other paths.
conformance_elsewhere() {
    local driver
    for driver in "${drivers[@]:1}"; do
        KVPACK_TEST_BRIEF=1 stage "conformance-$driver" on "$driver" program gpu_conformance
        stage "linear-$driver" on "$driver" program linear_wgpu
    done
}
gpu_tests_elsewhere() {
    local driver
    for driver in "${drivers[@]:1}"; do
        KVPACK_TEST_BRIEF=1 stage "gpu-$driver" on "$driver" program gpu "${kernels[@]}" "${steps[@]}" \
            "${of_the_host[@]}"
    done
}
# The best path that is left without wgpu's extensions to WebGPU.
strict_webgpu() {
    KVPACK_TEST_BRIEF=1 WGPU_STRICT_WEBGPU_COMPLIANCE=1 \
        stage gpu-strict-webgpu on "$first" program gpu "${kernels[@]}"
}
# With the checks that wgpu inserts (not the default) and the limits of a browser. Only this stage uses these shaders.
# Compiling them takes most of its time, so it runs only the path that every adapter has.
safe_checks() {
    KVPACK_CHECKS=safe KVPACK_PATH=floor WGPU_STRICT_WEBGPU_COMPLIANCE=1 \
        stage gpu-safe-checks on "$first" program gpu_conformance
}
# Without these checks, that path runs what compares kernels with their CPU twins.
floor() { KVPACK_PATH=floor stage gpu-floor on "$first" program gpu "${kernels[@]}" "${of_the_host[@]}"; }
# The examples compare their outputs with the CPU and with f64. Building the tests builds them too.
example() {
    local folder="${CARGO_TARGET_DIR:-target}/debug/examples"
    stage example on "$first" "$folder/engine_integration"
    stage example-serving on "$first" "$folder/serving"
    stage example-policies on "$first" "$folder/policies"
}

# The wheel for Python, in a workspace of its own: a debug build of the CPU backend, tested with NumPy.
python_wheel() {
    if scripts/python.sh tools >"$logs/python-tools.log" 2>&1 </dev/null; then
        stage python scripts/python.sh
    else
        not_run python "Python 3.10 or its packages cannot be had here, see target/test-logs/python-tools.log"
    fi
}

web() {
    if ! scripts/test-web.sh tools >"$logs/web-tools.log" 2>&1 </dev/null; then
        not_run web "Node.js, Chromium or npm packages cannot be installed here, see target/test-logs/web-tools.log"
        return
    fi
    stage web-tint scripts/test-web.sh tint
    stage web-report scripts/test-web.sh report
    if scripts/wasm-cargo.sh --how >"$logs/web-wasm.log" 2>&1 </dev/null; then
        stage web-build scripts/test-web.sh build && stage web-page scripts/test-web.sh page && \
            stage npm-package scripts/npm-package.sh
    else
        not_run web-page "there is no way to wasm here, see target/test-logs/web-wasm.log"
    fi
}

# What needs cargo's folder of the workspace, one after the other, because cargo locks it.
by_cargo() {
    stage clippy cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
    stage features every_feature_set
    stage docs env RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --all-features
    stage doctests on "$first" cargo test --locked --workspace --doc
    stage packages scripts/packages.sh
    stage rust-version promised_compiler
    if [ "$(uname -s)" = Linux ]; then web; fi
}

# The longest first, so that all end together.
three_at_a_time by_cargo python_wheel conformance_elsewhere gpu_tests_elsewhere gpu_tests other_programs \
    gpu_conformance cpu_conformance safe_checks floor strict_webgpu example
stage validation-messages no_validation_messages

summary
