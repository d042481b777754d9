#!/usr/bin/env bash
# Builds the candle program for a GPU of compute capability 9.0, on a machine with or without one. The binary is
# target/hosts/candle-host; it can be carried to another machine.
#
# candle compiles its kernels with nvcc and links libcuda, cudart, NVRTC, cuBLAS and cuRAND. All but the driver's library
# come from NVIDIA's packages on PyPI. libcuda is linked against a stub with the functions that cudarc names. The machine
# that runs the binary has the real driver, and LD_LIBRARY_PATH names the folders of the other libraries (those of
# PyTorch's packages suffice).
#
#   CUDA_COMPUTE_CAP   another capability than 90
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
built="$PWD/../../../target/hosts"
toolkit="$built/cuda-13.0"
cuda="$toolkit/cuda"
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}"

install_toolkit() {
    rm -rf "$toolkit"
    python3 -m venv "$toolkit/python"
    "$toolkit/python/bin/pip" install --quiet --disable-pip-version-check \
        'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
        'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cuda-cccl==13.0.*' 'nvidia-cublas==13.0.*' 'nvidia-curand==10.4.*'
    ln -s "$(echo "$toolkit"/python/lib/python3*/site-packages/nvidia/cu13)" "$cuda"
    # Packages carry libraries by their versioned names only; linkers look for the plain ones.
    local library
    for library in cudart nvrtc cublas cublasLt curand; do
        ln -sf "$(basename "$cuda"/lib/lib$library.so.*[0-9])" "$cuda/lib/lib$library.so"
    done
    ln -sfn lib "$cuda/lib64"
}

# The folder of a package's source.
package() {
    cargo metadata --locked --format-version 1 | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(*(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == sys.argv[1]))' "$1"
}

# A stub library with the names of the driver's functions.
stub_driver() {
    local bindings
    bindings=$(package cudarc)/src/driver/sys/mod.rs
    grep -oE '\bfn cu[A-Z][A-Za-z0-9_]*' "$bindings" | sort -u | sed 's/fn \(.*\)/void \1(void) {}/' >"$toolkit/cuda.c"
    cc -shared -Wl,-soname,libcuda.so.1 -o "$cuda/lib/libcuda.so" "$toolkit/cuda.c"
}

# candle's kernels for quantised matrices and mixtures of experts take half an hour to compile, and the programs call none
# of them. In their place nvcc compiles functions that end the process. The kernels that the programs call are PTX, which the
# driver assembles.
stub_kernels() {
    local functions
    functions=$(package candle-kernels)/src/ffi.rs
    echo '#include <stdlib.h>' >"$toolkit/stubs.cu"
    grep -oE '\bpub fn [a-z][A-Za-z0-9_]*' "$functions" | sort -u | sed 's/pub fn \(.*\)/extern "C" void \1() { abort(); }/' \
        >>"$toolkit/stubs.cu"
    : >"$toolkit/empty.cu"
    mv "$cuda/bin/nvcc" "$cuda/bin/nvcc-of-nvidia"
    cat >"$cuda/bin/nvcc" <<EOF
#!/usr/bin/env bash
arguments=()
for argument; do
    case "\$argument" in
        */moe_gguf.cu) argument="$toolkit/stubs.cu" ;;
        */moe_*.cu | */mmvq_*.cu | */mmq_*.cu) argument="$toolkit/empty.cu" ;;
    esac
    arguments+=("\$argument")
done
exec "$cuda/bin/nvcc-of-nvidia" "\${arguments[@]}"
EOF
    chmod +x "$cuda/bin/nvcc"
}

[ -e "$cuda/lib/libcurand.so" ] || install_toolkit
[ -e "$cuda/lib/libcuda.so" ] || stub_driver
[ -e "$toolkit/stubs.cu" ] || stub_kernels

export CUDA_HOME="$cuda" PATH="$cuda/bin:$PATH" LIBRARY_PATH="$cuda/lib"
cargo build --locked --release --target-dir "$built/candle" "$@"
cp "$built/candle/release/candle-host" "$built/candle-host"
echo "built $built/candle-host"
