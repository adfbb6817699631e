#!/bin/sh
# The GPU kernel tests under compute-sanitizer: every access of every case, then races and barriers of a sample.
#   tests/gpu/sanitize.sh [N]    memcheck takes every Nth case (4), racecheck and synccheck every 4 Nth
set -eu
cd "$(dirname "$0")/../.."
every=${1:-4}
tool() {
  name=$1 sample=$2
  shift 2
  echo "compute-sanitizer $name, every ${sample}th case" >&2
  compute-sanitizer --tool "$name" --error-exitcode 9 --print-limit 20 "$@" \
    "${PYTHON:-python3}" -m pytest tests/gpu/test_kernels.py --confcutdir tests/gpu -q -x -p no:cacheprovider --exact-buffers --sample "$sample" -k test_kernel
}
"${PYTHON:-python3}" tests/gpu/kernel_cases.py
tool memcheck "$every" --padding 32
tool racecheck $((every * 4))
tool synccheck $((every * 4))
