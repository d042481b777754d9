# Finds the Vulkan loader and its drivers on this machine. Sourced, never run.
#
# A Vulkan driver announces itself with a small JSON file, its manifest, in one of a few folders. If VK_DRIVER_FILES
# names one manifest, the loader sees that driver and no other.
# shellcheck shell=bash

swiftshader_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/target/swiftshader"
lavapipe_f16_dir="${swiftshader_dir%/*}/lavapipe-f16"

# The folders that the loader reads, one per line.
manifest_dirs() {
    local dir
    for dir in ${XDG_DATA_HOME:-$HOME/.local/share} /etc /usr/local/etc /usr/local/share /usr/share; do
        if [ -d "$dir/vulkan/icd.d" ]; then echo "$dir/vulkan/icd.d"; fi
    done
}

# The library that a manifest names, empty when it has none.
manifest_library() {
    sed -n 's/.*"library_path"[^"]*"\([^"]*\)".*/\1/p' "$1" | head -n 1
}

# Whether the dynamic linker finds the library that this manifest names.
manifest_usable() {
    local library
    library=$(manifest_library "$1")
    case "$library" in
        '') return 1 ;;
        /*) [ -e "$library" ] ;;
        */*) [ -e "$(dirname "$1")/$library" ] ;;
        *) shared_library_known "$library" ;;
    esac
}

# Whether the dynamic linker knows a library, from its cache or from LD_LIBRARY_PATH.
#
# The list is read whole before it is searched: under pipefail, a search that stops at its first hit would fail.
shared_library_known() {
    local known dir
    while IFS= read -r -d : dir; do
        if [ -n "$dir" ] && [ -e "$dir/$1" ]; then return 0; fi
    done <<<"${LD_LIBRARY_PATH:-}:"
    known=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null) || return 1
    case "$known" in *"$1 "*) return 0 ;; *) return 1 ;; esac
}

loader_present() {
    shared_library_known libvulkan.so.1
}

# Manifests of usable drivers whose file name matches the pattern, one per line. Other architectures' drivers
# (lvp_icd.i686.json on an x86-64 machine) are left out.
find_manifests() {
    local dir file
    manifest_dirs | while read -r dir; do
        for file in "$dir"/$1; do
            [ -f "$file" ] || continue
            case "$file" in
                *."$(uname -m)".json) ;;
                *.i[3-6]86.json | *.x86_64.json | *.aarch64.json | *.armv7l.json | *.riscv64.json) continue ;;
            esac
            if manifest_usable "$file"; then echo "$file"; fi
        done
    done
}

lavapipe_manifest() {
    find_manifests 'lvp_icd*.json' | sed -n 1p
}

swiftshader_manifest() {
    local file="$swiftshader_dir/vk_swiftshader_icd.json"
    if [ -f "$file" ] && manifest_usable "$file"; then echo "$file"; fi
}

# The manifest of Mesa 25's lavapipe, whose 16-bit floats Dawn can use.
lavapipe_f16_manifest() {
    local file="$lavapipe_f16_dir/lvp_icd.json"
    if [ -f "$file" ] && manifest_usable "$file"; then echo "$file"; fi
}

# Drivers that the loader offers a Vulkan program now: those that the user names, otherwise those installed.
installed_drivers() {
    local named="${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" file
    if [ -z "$named" ]; then
        find_manifests '*.json'
        return
    fi
    printf '%s\n' "$named" | tr ':' '\n' | while read -r file; do
        if [ -f "$file" ] && manifest_usable "$file"; then echo "$file"; fi
    done
}

# The manifest of the Khronos validation layer, empty when it is not installed.
validation_layer() {
    local dir
    for dir in ${VK_LAYER_PATH:-} ${XDG_DATA_HOME:-$HOME/.local/share}/vulkan/explicit_layer.d \
        /etc/vulkan/explicit_layer.d /usr/local/share/vulkan/explicit_layer.d /usr/share/vulkan/explicit_layer.d; do
        if [ -f "$dir/VkLayer_khronos_validation.json" ]; then
            echo "$dir/VkLayer_khronos_validation.json"
            return
        fi
    done
}
