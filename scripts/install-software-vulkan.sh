#!/usr/bin/env bash
# Makes sure that there is a Vulkan adapter, if necessary one that runs on the processor.
#
#   install-software-vulkan.sh                 any adapter will do: installs nothing if a driver is present,
#                                              otherwise the Vulkan loader and Mesa's lavapipe
#   install-software-vulkan.sh --lavapipe      lavapipe, whatever other drivers there are
#   install-software-vulkan.sh --validation    the Khronos validation layers
#   install-software-vulkan.sh --swiftshader   SwiftShader, unpacked under target/swiftshader, not installed
#   install-software-vulkan.sh --lavapipe-f16  the lavapipe of Mesa 25, whose 16-bit floats Dawn uses, from Debian's
#                                              bookworm-backports, unpacked under target/lavapipe-f16, not installed
#
# Options combine. The script changes nothing that is already installed, so it can run any number of times. It installs
# through apt on Debian and Ubuntu, as root or through a sudo that asks for no password. Elsewhere it prints what to
# install and fails. SwiftShader is part of Debian's package chromium-common; only its one library is unpacked.
set -euo pipefail
# shellcheck source=scripts/vulkan-drivers.sh
source "$(dirname "${BASH_SOURCE[0]}")/vulkan-drivers.sh"
# shellcheck source=scripts/apt-apart.sh
source "$(dirname "${BASH_SOURCE[0]}")/apt-apart.sh"

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
say() { printf 'vulkan: %s\n' "$*"; }
fail() {
    printf 'vulkan: %s\n' "$@" >&2
    exit 1
}

want_any=1 want_lavapipe='' want_validation='' want_swiftshader='' want_lavapipe_f16=''
for option in "$@"; do
    want_any=''
    case "$option" in
        --lavapipe) want_lavapipe=1 ;;
        --validation) want_validation=1 ;;
        --swiftshader) want_swiftshader=1 ;;
        --lavapipe-f16) want_lavapipe_f16=1 ;;
        -h | --help) usage && exit 0 ;;
        *)
            echo "unknown option $option" >&2
            usage >&2
            exit 2
            ;;
    esac
done

[ "$(uname -s)" = Linux ] || {
    say "this system is $(uname -s): wgpu uses its own graphics interface there, nothing is installed"
    [ -n "$want_any" ] && exit 0
    fail "the software Vulkan drivers of the tests are set up on Linux only;" \
        "to test on this machine's own adapter, run: KVPACK_TEST_DRIVERS=system make test"
}

# --- apt, as root -----------------------------------------------------------------------------------------------

as_root=()
become_root() { # what needs it, the command to give when that fails
    [ "$(id -u)" != 0 ] || return 0
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        fail "$1 needs root." "Run as root: $2"
    fi
}

lists_updated=''
update_lists() {
    [ -z "$lists_updated" ] || return 0
    lists_updated=1
    say "reading the package lists"
    "${as_root[@]}" apt-get update -qq </dev/null || fail "apt-get update failed: is the network reachable?"
}

install_packages() { # packages...
    [ "$#" -gt 0 ] || return 0
    command -v apt-get >/dev/null || fail "not everything is there, and this system has no apt-get." \
        "Install what stands for these Debian packages with your package manager, then run this again: $*"
    become_root "installing $*" "apt-get install $*"
    say "installing $*"
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@")
    # The first attempt fails if the lists are old or missing.
    "${apt[@]}" </dev/null >/dev/null 2>&1 && return
    update_lists
    "${apt[@]}" </dev/null >/dev/null || fail "apt-get install $* failed; the reason is above"
}

# --- SwiftShader ------------------------------------------------------------------------------------------------

swiftshader_unavailable() {
    fail "SwiftShader is not available from this distribution ($1)." \
        "On Debian it is a part of the package chromium-common; Ubuntu ships Chromium as a snap only." \
        "To test on lavapipe alone, run: KVPACK_TEST_DRIVERS=lavapipe make test" \
        "To use a SwiftShader of your own, put libvk_swiftshader.so and a manifest vk_swiftshader_icd.json" \
        "into target/swiftshader."
}

download_chromium_common() { # into this folder
    # -o: the folder belongs to the caller, so apt's own unprivileged user cannot write there.
    (cd "$1" && apt-get download -qq -o APT::Sandbox::User=root chromium-common </dev/null) >"$1/log" 2>&1
}

swiftshader() {
    command -v apt-get >/dev/null || swiftshader_unavailable "it has no apt-get"
    local work
    mkdir -p "$swiftshader_dir"
    work=$(mktemp -d "$swiftshader_dir/unpack.XXXXXX")
    # shellcheck disable=SC2064 # the folder's name must expand now
    trap "rm -rf '$work'" EXIT
    say "downloading chromium-common (about 30 MB) for its SwiftShader library"
    if ! download_chromium_common "$work"; then
        become_root "reading the package lists" "apt-get update"
        update_lists
        if ! download_chromium_common "$work"; then
            sed 's/^/    /' "$work/log" >&2
            swiftshader_unavailable "no package chromium-common could be downloaded"
        fi
    fi
    dpkg-deb --fsys-tarfile "$work"/chromium-common_*.deb >"$work/files.tar"
    local member
    member=$(tar -tf "$work/files.tar" | grep '/libvk_swiftshader\.so$' || true)
    [ -n "$member" ] || swiftshader_unavailable "its chromium-common has no libvk_swiftshader.so"
    tar -xOf "$work/files.tar" "$member" >"$work/libvk_swiftshader.so"
    mv "$work/libvk_swiftshader.so" "$swiftshader_dir/"
    cat >"$swiftshader_dir/vk_swiftshader_icd.json" <<'JSON'
{
    "file_format_version": "1.0.0",
    "ICD": {
        "library_path": "./libvk_swiftshader.so",
        "api_version": "1.3.0"
    }
}
JSON
    rm -rf "$work"
    trap - EXIT
    [ -n "$(swiftshader_manifest)" ] || fail "SwiftShader was unpacked but cannot be used on this system"
}

# --- the lavapipe of Mesa 25 -------------------------------------------------------------------------------------

lavapipe_f16() {
    local apt="$lavapipe_f16_dir/apt" suite=bookworm-backports unavailable
    unavailable="Put a lavapipe of Mesa 25 or later, libvulkan_lvp.so and its manifest lvp_icd.json, into target/lavapipe-f16."
    say "downloading mesa-vulkan-drivers (about 11 MB) of $suite for its lavapipe"
    apart_suite "$apt" "$suite" && apart "$apt" apt-get update -qq >/dev/null &&
        (cd "$apt" && apart "$apt" apt-get download -qq mesa-vulkan-drivers) ||
        fail "Debian's $suite could not be reached, or this system is not Debian." "$unavailable"
    dpkg-deb --fsys-tarfile "$apt"/mesa-vulkan-drivers_*.deb >"$apt/files.tar"
    tar -xOf "$apt/files.tar" "$(tar -tf "$apt/files.tar" | grep '/libvulkan_lvp\.so$')" >"$lavapipe_f16_dir/libvulkan_lvp.so"
    cat >"$lavapipe_f16_dir/lvp_icd.json" <<'JSON'
{
    "file_format_version": "1.0.0",
    "ICD": {
        "library_path": "./libvulkan_lvp.so",
        "api_version": "1.4.0"
    }
}
JSON
    rm -rf "$apt"
    # It links the same libraries as the lavapipe of Debian 12.
    if ldd "$lavapipe_f16_dir/libvulkan_lvp.so" | grep 'not found'; then
        rm "$lavapipe_f16_dir/lvp_icd.json"
        fail "this lavapipe needs other libraries than this system has." "$unavailable"
    fi
}

# --- what was asked for -----------------------------------------------------------------------------------------

if [ -n "$want_any" ]; then
    drivers=$(installed_drivers)
    if [ -n "$drivers" ]; then
        say "a Vulkan driver is there, no other is installed: ${drivers//$'\n'/ }"
    else
        want_lavapipe=1
    fi
fi

if [ -n "$want_lavapipe_f16" ]; then want_lavapipe=1; fi
packages=()
loader_present || packages+=(libvulkan1)
if [ -n "$want_lavapipe" ] && [ -z "$(lavapipe_manifest)" ]; then packages+=(mesa-vulkan-drivers); fi
if [ -n "$want_validation" ] && [ -z "$(validation_layer)" ]; then packages+=(vulkan-validationlayers); fi
install_packages "${packages[@]}"

loader_present || fail "the Vulkan loader, libvulkan.so.1, is still not there"
if [ -n "$want_lavapipe" ]; then
    [ -n "$(lavapipe_manifest)" ] || fail "mesa-vulkan-drivers is installed but has no lavapipe for $(uname -m)"
    say "lavapipe: $(lavapipe_manifest)"
fi
if [ -n "$want_validation" ]; then
    [ -n "$(validation_layer)" ] || fail "vulkan-validationlayers is installed but has no Khronos validation layer"
    say "validation layers: $(validation_layer)"
fi
if [ -n "$want_swiftshader" ]; then
    [ -n "$(swiftshader_manifest)" ] || swiftshader
    say "SwiftShader: $(swiftshader_manifest)"
fi
if [ -n "$want_lavapipe_f16" ]; then
    [ -n "$(lavapipe_f16_manifest)" ] || lavapipe_f16
    say "lavapipe with 16-bit floats: $(lavapipe_f16_manifest)"
fi
