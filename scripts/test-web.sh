#!/usr/bin/env bash
# Tests kvpack in the browser. scripts/test.sh runs tools, tint, build, page and report; the rest runs by itself:
#
#   test-web.sh tools    installs what the other parts need: Node.js, Chromium, and the npm packages in web/test
#   test-web.sh tint     compiles every WGSL text that a browser may get with Tint, without a GPU
#   test-web.sh build    builds the page in the profile web-test; exits with 3 if wasm cannot be built here
#   test-web.sh page     tests the page in headless Chromium on SwiftShader: a check of each kind, one row of each
#                        measurement, and failures; screenshots under target/web-shots
#   test-web.sh report   tests the pages of `kvpack eval --report` and `compare` in headless Chromium: light, dark and on
#                        a phone; screenshots under target/report-shots
#   test-web.sh dawn     runs the quick cases of the path f16 through Dawn in Node.js, on a lavapipe of Mesa 25
#   test-web.sh all      runs all of these on the published page, with every conformance case and every width
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_packages() { # packages...
    command -v apt-get >/dev/null || {
        echo "web: install what stands for these Debian packages with your package manager: $*" >&2
        return 1
    }
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
    echo "web: installing $*"
    "${apt[@]}" </dev/null >/dev/null 2>&1 && return
    "${as_root[@]}" apt-get update -qq </dev/null
    "${apt[@]}" </dev/null >/dev/null
}

tools() {
    local missing=()
    command -v node >/dev/null || missing+=(nodejs)
    command -v npm >/dev/null || missing+=(npm)
    [ -n "${KVPACK_CHROMIUM:-}" ] || command -v chromium >/dev/null || missing+=(chromium)
    [ "${#missing[@]}" = 0 ] || install_packages "${missing[@]}"
    # No install script runs: both packages work as soon as they are unpacked.
    (cd web/test && npm ci --silent --ignore-scripts --no-audit --no-fund)
    echo "web: node $(node --version), $(chromium --version 2>/dev/null || echo "$KVPACK_CHROMIUM")"
}

tint() {
    "${CARGO:-cargo}" test --locked --workspace --test shaders -- --ignored --exact --nocapture write_texts_for_browsers
    node web/test/tint.mjs target/tmp/browser-shaders
}

# Builds the command as a workspace test run does, so nothing is compiled twice.
build_command() {
    "${CARGO:-cargo}" test --locked --workspace --no-run --test cli --quiet
    kvpack="${CARGO_TARGET_DIR:-target}/debug/kvpack"
}

page() { # arguments of page.mjs
    rm -rf target/web-shots
    node web/test/page.mjs target/debug/kvpack-web-build target/web target/web-shots "$@"
    # The file that the page saves must work next to files that the command writes.
    build_command
    "$kvpack" compare browser=target/web-shots/bench.json --out target/web-shots/compared.html
}

# One format only, to take seconds.
report() {
    mkdir -p target/report-pages
    build_command
    "${CARGO:-cargo}" test --locked --workspace --test report --quiet
    local built="${CARGO_TARGET_DIR:-target}" dump=cli/data/smollm2_kv.safetensors
    "$kvpack" eval "$dump" --backend cpu --format "4-bit per channel" --report target/report-pages/a >/dev/null
    "$kvpack" bench --quick --backend cpu --shape g1-b1-4k --footprint 1 --json >target/report-pages/b.json
    "$kvpack" check --backend cpu --quick --filter format- --json >target/report-pages/c.json
    "$kvpack" compare accuracy=target/report-pages/a.json speed=target/report-pages/b.json checks=target/report-pages/c.json \
        --out target/report-pages/all.html
    node web/test/report.mjs target/report-shots target/report-pages/a.html target/report-pages/all.html "$built/tmp/every-kind.html"
}

# Chromium runs on SwiftShader here, which has no 16-bit floats.
dawn() {
    scripts/install-software-vulkan.sh --lavapipe-f16
    # shellcheck source=scripts/vulkan-drivers.sh
    source scripts/vulkan-drivers.sh
    local manifest
    manifest=$(lavapipe_f16_manifest)
    env VK_DRIVER_FILES="$manifest" VK_ICD_FILENAMES="$manifest" NODEVICE_SELECT=1 node web/test/dawn.mjs target/web f16
}

case "${1:-}" in
    tools) tools ;;
    tint) tint ;;
    build) scripts/build-web.sh web-test ;;
    page) page ;;
    report) report ;;
    dawn) dawn ;;
    all)
        tools
        tint
        scripts/build-web.sh
        report
        dawn
        page --all
        ;;
    *)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
