#!/usr/bin/env bash
# Checks and times one device: lists the adapters, runs the conformance cases, then times decode steps over large
# caches in several short processes, so that one lost device or one killed process costs one group of rows only.
#
#   scripts/bench-device.sh [KVPACK]     KVPACK is the binary, target/release/kvpack if none is named
#
#   BENCH_RESULTS     the folder for logs and JSON, target/bench-device by default
#   BENCH_TIMEOUT     seconds for each process, 300 by default
#
# WGPU_BACKEND and WGPU_ADAPTER_NAME choose the adapter. It builds nothing. The exit code is 1 if a check failed, a
# result was wrong or a group did not finish.
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
limit="${BENCH_TIMEOUT:-300}"
mkdir -p "$results" && rm -f "$results"/*.json "$results"/*.log || exit

failed=0
fail() {
    printf 'FAILED %s\n' "$*"
    failed=1
}

"$kvpack" list | tee "$results/list.log"
[ "${PIPESTATUS[0]}" = 0 ] || fail "kvpack list"

for checks in safe trusted; do
    printf '\n== check, %s\n' "$checks"
    timeout "$limit" "$kvpack" check --backend wgpu --checks "$checks" >"$results/check-$checks.log" 2>&1 ||
        fail "kvpack check --checks $checks: see $results/check-$checks.log"
    grep -E '^FAILED|passed, ' "$results/check-$checks.log"
done

if ldconfig -p | grep -q 'libcuda\.so'; then
    printf '\n== cuda\n'
    timeout "$limit" "$kvpack" check --backend cuda >"$results/check-cuda.log" 2>&1 ||
        fail "kvpack check --backend cuda: see $results/check-cuda.log"
    grep -E '^FAILED|passed, ' "$results/check-cuda.log"
    timeout "$limit" "$kvpack" bench --backend cuda --suite decode --format 'per channel' 2>&1 | tee "$results/bench-cuda.log"
    [ "${PIPESTATUS[0]}" = 0 ] || fail "bench --backend cuda: see $results/bench-cuda.log"
else
    printf '\n== cuda: there is no libcuda, so the CUDA backend is neither checked nor timed\n'
fi

# Every format is measured beside f16, which each process times again: × f16 needs it.
group() { # shape, query, format
    local log="$results/$1-$2-${3// /-}"
    timeout "$limit" "$kvpack" bench --backend wgpu --checks trusted --shape "$1" --query "$2" --format "$3" --json \
        >"$log.json" 2>"$log.log"
    local status=$?
    [ "$status" = 0 ] || fail "bench $1, query $2, $3: exit code $status, see $log.log"
}

printf '\n== bench\n'
for format in "8-bit per channel" "4-bit per channel" "2-bit per channel" "1-bit per channel"; do
    group g1-b128-8k int16 "$format"
    group g1-b128-8k int8 "$format"
    group g4-b128-32k int16 "$format"
    group g4-b128-32k int8 "$format"
done

python3 - "$results" <<'PYTHON' || failed=1
import json, pathlib, sys

print(f"{'shape':<12} {'query':<6} {'format':<28} {'NMSE':>8} {'MB':>9} {'µs':>9} {'GB/s':>7} {'% read':>7} {'× f16':>6}")
wrong = False
seen = set()
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    query = "int8" if "-int8-" in path.name else "int16"
    try:
        report = json.loads(path.read_text())
    except ValueError:
        continue  # the process did not finish, which was reported above
    for shape in report["shapes"]:
        for row in shape["rows"]:
            key = (shape["shape"], row["format"], query)
            if row["format"] == "f16":
                key = key[:2]
            if key in seen:
                continue
            seen.add(key)
            line = f"{shape['shape']:<12} {'-' if row['format'] == 'f16' else query:<6} {row['format']:<28}"
            if row["outcome"] != "timed":
                wrong |= row["outcome"] == "wrong"
                print(line, row["outcome"].upper(), row.get("reason", ""))
                continue
            nmse = "-" if row["nmse"] is None else f"{row['nmse']:.0e}"
            times = "-" if row["times_f16"] is None else f"{row['times_f16']:.2f}"
            print(f"{line} {nmse:>8} {row['bytes'] / 1e6:9.1f} {row['step_us']:9.1f} {row['gigabytes_per_second']:7.0f}"
                  f" {row['percent_of_read']:7.1f} {times:>6}")
sys.exit(wrong)
PYTHON

exit "$failed"
