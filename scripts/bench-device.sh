#!/usr/bin/env bash
# Times and checks one device. The script lists the adapters, times decode steps, and then runs the conformance cases in
# parallel processes. Each backend and shape is timed in a process of its own, so a lost device costs one group of rows
# only, and no row heats the device for another. Each row is checked before it is timed, and printed when it is ready.
# results.json in the results folder always holds all rows so far, so stopping the script loses nothing. The script
# builds nothing. An H200 takes about ten minutes.
#
#   scripts/bench-device.sh [KVPACK]     KVPACK is the binary, target/release/kvpack if none is named
#
#   BENCH_RESULTS     the folder for logs and JSON, target/bench-device by default; files of an earlier run of this
#                     script are deleted there, and nothing else
#   BENCH_LIMIT       seconds for the whole script, 720 by default; work that has not begun by then is skipped and
#                     reported
#   BENCH_TIMEOUT     seconds for each process, 120 by default
#   BENCH_SHAPES      the shapes, by default those of `kvpack bench --suite decode` except g16-b8-32k
#   BENCH_FORMAT      part of the formats' names, 'bit per channel' by default; '' is every format
#
# WGPU_BACKEND and WGPU_ADAPTER_NAME choose the adapter. If libcuda is installed, the CUDA backend is timed and checked
# too. The exit code is 1 if a check failed, a result was wrong, or something did not finish or was skipped.
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
whole="${BENCH_LIMIT:-720}"
limit="${BENCH_TIMEOUT:-120}"
read -ra shapes <<<"${BENCH_SHAPES:-g4-b8-32k g8-b8-32k g1-b8-8k g4-b32-8k g4-b1-4k g4-b1-128k g4-b8-32k-shuffled g4-b8-32k-images}"
format="${BENCH_FORMAT-bit per channel}"
mkdir -p "$results" || exit
rm -f "$results"/{list.log,results.json} "$results"/bench-{wgpu,cuda}-*.{json,log} \
    "$results"/check-{wgpu-safe,wgpu-trusted,cuda}-*.log || exit
backends=(wgpu)
if ldconfig -p | grep -q 'libcuda\.so'; then
    backends+=(cuda)
fi

failed=0
fail() {
    printf 'FAILED %s\n' "$*"
    failed=1
}
end() {
    printf '\nall rows so far: %s\n' "$results/results.json"
    exit "$failed"
}
trap 'fail "stopped before the end"; end' INT TERM

# The seconds that a process may take: its own limit, or the rest of the whole limit. Prints nothing if too few are left.
seconds_left() {
    local left=$((whole - SECONDS))
    [ "$left" -ge 5 ] && echo $((left < limit ? left : limit))
}

"$kvpack" list | tee "$results/list.log"
[ "${PIPESTATUS[0]}" = 0 ] || fail "kvpack list"

time_rows() { # backend, name, arguments
    local backend="$1" name="$2" seconds
    shift 2
    seconds=$(seconds_left) || {
        fail "no time is left for kvpack bench --backend $backend $*"
        return
    }
    local log="$results/bench-$backend-$name"
    local options=(--backend "$backend" --seconds 0.03)
    timeout "$seconds" "$kvpack" bench "${options[@]}" "$@" --json >"$log.json" 2>"$log.log" ||
        fail "kvpack bench ${options[*]} $*: exit code $?, see $log.log"
    python3 scripts/bench-rows.py "$results" "$log.json" || failed=1
}
printf '\n== bench\n'
for shape in "${shapes[@]}"; do
    for backend in "${backends[@]}"; do
        time_rows "$backend" "$shape" --shape "$shape" ${format:+--format "$format"}
    done
done
for backend in "${backends[@]}"; do
    [ -n "${BENCH_SHAPES:-}" ] || time_rows "$backend" mixed --suite mixed
done

# There are several parts for every process that runs, because compiling the kernels takes most of the time.
parts=$((3 * $(nproc)))
check() { # name, arguments
    local name="$1" seconds unfinished
    shift
    printf '\n== check %s\n' "$*"
    seconds=$(seconds_left) || {
        fail "no time is left for kvpack check $*"
        return
    }
    # Every part ends when the whole time is up.
    seq "$parts" | timeout "$seconds" xargs -P "$(nproc)" -I{} bash -c '
        log="$1-{}.log" && shift
        timeout "$@" --part "{}/'"$parts"'" >"$log" 2>&1
        echo "exit code $?" >>"$log"
    ' _ "$results/check-$name" "$limit" "$kvpack" check --all --jobs 1 "$@"
    awk '/passed, / {passed += $1; wrong += $3} END {print passed + 0, "passed,", wrong + 0, "failed"}' \
        "$results/check-$name"-*.log
    grep -h '^FAILED' "$results/check-$name"-*.log
    unfinished="$(for part in $(seq "$parts"); do
        grep -qs '^exit code 0' "$results/check-$name-$part.log" || echo "$results/check-$name-$part.log"
    done | tr '\n' ' ')"
    [ -z "$unfinished" ] || fail "kvpack check $*: see $unfinished"
}
check wgpu-safe --backend wgpu --checks safe
check wgpu-trusted --backend wgpu --checks trusted
if [ "${#backends[@]}" = 2 ]; then
    check cuda --backend cuda
else
    printf '\n== cuda: there is no libcuda, so the CUDA backend is neither checked nor timed\n'
fi
end
