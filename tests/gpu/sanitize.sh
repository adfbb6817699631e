#!/bin/sh
# The tests of single kernels under compute-sanitizer: accesses (memcheck), races (racecheck) and barriers (synccheck).
#   tests/gpu/sanitize.sh [N [GROUP ...]]    N: memcheck takes every Nth Triton case of an op (4), the others every 4 Nth;
#                                            GROUP: of those below; default: all of them
# The three tools of a group run side by side. SECONDS_EACH: their time limit (default: none).
set -eu
cd "$(dirname "$0")/../.."
every=${1:-4}
[ $# -eq 0 ] || shift
python=${PYTHON:-python3}
SEED=${SEED:-$(date +%s)}
export SEED
logs=$(mktemp -d)
failed=""

tool() { # NAME SAMPLE FILE EXPRESSION [OPTION ...]
  name=$1 sample=$2 file=$3 cases=$4
  shift 4
  timeout "${SECONDS_EACH:-0}" compute-sanitizer --tool "$name" --error-exitcode 9 --print-limit 20 "$@" "$python" -m \
    pytest "tests/gpu/$file" --confcutdir tests/gpu -q -x -p no:cacheprovider --exact-buffers --sample "$sample" -k "$cases"
}

group() { # NAME FILE EXPRESSION SAMPLE-OF-MEMCHECK SAMPLE-OF-OTHERS
  name=$1
  echo "$name: compute-sanitizer, every ${4}th and ${5}th case of a test, SEED=$SEED" >&2
  tool memcheck "$4" "$2" "$3" --padding 32 >"$logs/$name-memcheck" 2>&1 & memory=$!
  tool racecheck "$5" "$2" "$3" --racecheck-indirect-barrier-dependency >"$logs/$name-racecheck" 2>&1 & races=$!
  tool synccheck "$5" "$2" "$3" >"$logs/$name-synccheck" 2>&1 & barriers=$!
  for job in "memcheck $memory" "racecheck $races" "synccheck $barriers"; do
    status=0
    wait "${job#* }" || status=$?
    tail -n 40 "$logs/$name-${job% *}"
    [ $status -eq 0 ] || failed="$failed $name:${job% *}($status)"
  done
}

for name in ${*:-triton products slices attention codes}; do
  case $name in
    triton)
      "$python" tests/gpu/kernel_cases.py
      group triton test_kernels.py test_kernel "$every" $((every * 4)) ;;
    products) group products test_cuda_kernels.py "not in_slices" $((every * 4)) $((every * 16)) ;;
    # Cases of a test are in the order of their ops or schedules; these samples have at least one of each op.
    slices) group slices test_cuda_kernels.py in_slices 24 24 ;;
    attention) group attention test_decode_attention.py "" 2 2 ;;
    codes) group codes test_cuda_expert_codes.py "" 7 7 ;;
    *) echo "unknown group $name" >&2; exit 2 ;;
  esac
done
rm -r "$logs"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 9; }
