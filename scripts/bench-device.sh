#!/usr/bin/env bash
# Checks and times one device: lists the adapters, runs the conformance cases in parallel processes, then times decode
# steps, one process for each backend and shape, so that one lost device costs one group of rows only and no row heats
# the device for another. It builds nothing and prints one table; an H200 takes about five minutes.
#
#   scripts/bench-device.sh [KVPACK]     KVPACK is the binary, target/release/kvpack if none is named
#
#   BENCH_RESULTS     the folder for logs and JSON, target/bench-device by default
#   BENCH_TIMEOUT     seconds for each process, 120 by default
#   BENCH_SHAPES      the shapes, those of `kvpack bench --suite decode` by default
#   BENCH_FORMAT      part of the formats' names, 'bit per channel' by default; '' is every format
#
# WGPU_BACKEND and WGPU_ADAPTER_NAME choose the adapter. Where there is libcuda, the CUDA backend is checked and timed too.
# The exit code is 1 if a check failed, a result was wrong or a process did not finish.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

kvpack="${1:-target/release/kvpack}"
[ -x "$kvpack" ] || {
    echo "there is no program $kvpack: run cargo build --release, or name the kvpack binary" >&2
    exit 2
}
command -v python3 >/dev/null || {
    echo "python3 is needed to print the table" >&2
    exit 2
}
results="${BENCH_RESULTS:-target/bench-device}"
limit="${BENCH_TIMEOUT:-120}"
read -ra shapes <<<"${BENCH_SHAPES:-g4-b8-32k g4-b8-32k-shuffled g4-b8-32k-images g4-b32-8k g1-b8-8k g4-b1-4k g4-b1-128k g8-b8-32k}"
format="${BENCH_FORMAT-bit per channel}"
mkdir -p "$results" && rm -f "$results"/*.json "$results"/*.log || exit
backends=(wgpu)
if ldconfig -p | grep -q 'libcuda\.so'; then
    backends+=(cuda)
fi

failed=0
fail() {
    printf 'FAILED %s\n' "$*"
    failed=1
}

"$kvpack" list | tee "$results/list.log"
[ "${PIPESTATUS[0]}" = 0 ] || fail "kvpack list"

# In parts, several for every process that runs: compiling the kernels takes most of the time.
parts=$((3 * $(nproc)))
check() { # name, arguments
    local name="$1" unfinished
    shift
    seq "$parts" | xargs -P "$(nproc)" -I{} bash -c '
        log="$1-{}.log" && shift
        timeout "$@" --part "{}/'"$parts"'" >"$log" 2>&1
        echo "exit code $?" >>"$log"
    ' _ "$results/check-$name" "$limit" "$kvpack" check "$@"
    awk '/passed, / {passed += $1; wrong += $3} END {print passed + 0, "passed,", wrong + 0, "failed"}' \
        "$results/check-$name"-*.log
    grep -h '^FAILED' "$results/check-$name"-*.log
    unfinished="$(grep -L '^exit code 0' "$results/check-$name"-*.log | tr '\n' ' ')"
    [ -z "$unfinished" ] || fail "kvpack check $*: see $unfinished"
}
printf '\n== check, wgpu, checked shaders\n'
check wgpu-safe --backend wgpu --checks safe
printf '\n== check, wgpu, trusted shaders\n'
check wgpu-trusted --backend wgpu --checks trusted
if [ "${#backends[@]}" = 2 ]; then
    printf '\n== check, cuda\n'
    check cuda --backend cuda
else
    printf '\n== cuda: there is no libcuda, so the CUDA backend is neither checked nor timed\n'
fi

time_rows() { # backend, name, arguments
    local backend="$1" name="$2"
    shift 2
    local log="$results/bench-$backend-$name"
    local options=(--backend "$backend" --seconds 0.03)
    [ "$backend" = cuda ] || options+=(--checks trusted --query int8)
    timeout "$limit" "$kvpack" bench "${options[@]}" "$@" --json >"$log.json" 2>"$log.log" ||
        fail "kvpack bench ${options[*]} $*: exit code $?, see $log.log"
}
printf '\n== bench\n'
for backend in "${backends[@]}"; do
    for shape in "${shapes[@]}"; do
        time_rows "$backend" "$shape" --shape "$shape" ${format:+--format "$format"}
    done
    [ -n "${BENCH_SHAPES:-}" ] || time_rows "$backend" mixed --suite mixed
done

python3 - "$results" <<'PYTHON' || failed=1
import json, pathlib, sys

print(f"{'backend':<8} {'shape':<18} {'format':<58} {'NMSE':>8} {'int16':>8} {'MB':>9} {'µs':>9} {'GB/s':>7} {'% read':>7} {'× f16':>6}")
wrong = False
shapes = []
for path in sorted(pathlib.Path(sys.argv[1]).glob("bench-*.json")):
    try:
        shapes += [(path.name.split("-")[1], shape) for shape in json.loads(path.read_text())["shapes"]]
    except ValueError:
        continue  # the process did not finish, which was reported above
steps = {(backend, shape["shape"], row["format"]): row.get("step_us") for backend, shape in shapes for row in shape["rows"]}
for backend, shape in shapes:
    alone = {row["format"]: row.get("step_us") for row in shape["rows"]}
    for row in shape["rows"]:
        line = f"{backend:<8} {shape['shape']:<18} {row['format'][:58]:<58}"
        if row["outcome"] != "timed":
            wrong |= row["outcome"] == "wrong"
            print(line, row["outcome"].upper(), row.get("reason", ""))
            continue
        times = "-" if row["times_f16"] is None else f"{row['times_f16']:.2f}"
        parts = [alone.get(part) for part in row["parts"]] if len(row["parts"]) > 1 else []
        beside = f"  parts alone {sum(parts):.1f} µs" if parts and all(parts) else ""
        in_order = steps.get((backend, shape["shape"].removesuffix("-shuffled"), row["format"]))
        if shape["shape"].endswith("-shuffled") and in_order:
            beside = f"  pages in order {in_order:.1f} µs"
        int16 = "-" if row["nmse_int16"] is None else f"{row['nmse_int16']:.0e}"
        print(f"{line} {row['nmse']:8.0e} {int16:>8} {row['bytes'] / 1e6:9.1f} {row['step_us']:9.1f}"
              f" {row['gigabytes_per_second']:7.0f} {row['percent_of_read']:7.1f} {times:>6}{beside}")
sys.exit(wrong)
PYTHON

exit "$failed"
