#!/bin/sh
# The GPU kernel tests under compute-sanitizer: accesses of a sample of the cases, races and barriers of fewer.
#   tests/gpu/sanitize.sh [N]    memcheck takes every Nth case (4), racecheck and synccheck every 4 Nth;
#                                of the CUDA C++ kernels' cases, which are schedules of a product, every 4 Nth and 16 Nth
set -eu
cd "$(dirname "$0")/../.."
every=${1:-4}
tool() {
  name=$1 sample=$2 file=$3
  shift 3
  echo "compute-sanitizer $name, $file, every ${sample}th case" >&2
  compute-sanitizer --tool "$name" --error-exitcode 9 --print-limit 20 "$@" \
    "${PYTHON:-python3}" -m pytest "tests/gpu/$file" --confcutdir tests/gpu -q -x -p no:cacheprovider --exact-buffers --sample "$sample" -k "test_kernel or cuda_kernels"
}
"${PYTHON:-python3}" tests/gpu/kernel_cases.py
for file in test_kernels.py test_cuda_kernels.py; do
  tool memcheck "$every" $file --padding 32
  tool racecheck $((every * 4)) $file
  tool synccheck $((every * 4)) $file
  every=$((every * 4))
done
