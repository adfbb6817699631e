#!/bin/sh
# The tests of single kernels under compute-sanitizer: accesses (memcheck), races (racecheck) and barriers (synccheck).
#   tests/gpu/sanitize.sh [N [GROUP ...]]    N: memcheck takes every Nth Triton case of an op (4), the others every 4 Nth;
#                                            GROUP: of those below; default: all of them
# The tools of a group run side by side. SECONDS_EACH: their time limit (default: none). LOGS: a folder for their whole
# output (default: none; the last 40 lines are shown).
set -eu
cd "$(dirname "$0")/../.."
every=${1:-4}
[ $# -eq 0 ] || shift
python=${PYTHON:-python3}
SEED=${SEED:-$(date +%s)}
export SEED
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
failed=""

tool() { # NAME SAMPLE FILE EXPRESSION
  pytest=""
  case $1 in
    memcheck) more="--padding 32" ;;
    racecheck) more=--racecheck-indirect-barrier-dependency pytest=--every-thread-arrives ;;
    *) more="--num-cuda-barriers 65536" ;;
  esac
  # shellcheck disable=SC2086
  timeout "${SECONDS_EACH:-0}" compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 20 $more "$python" -m \
    pytest "tests/gpu/$3" --confcutdir tests/gpu -q -x -p no:cacheprovider --exact-buffers $pytest --sample "$2" -k "$4"
}

group() { # NAME FILE EXPRESSION SAMPLE-OF-MEMCHECK SAMPLE-OF-OTHERS
  name=$1 file=$2 cases=$3 first=$4 others=$5 jobs=""
  echo "$name: compute-sanitizer, every ${first}th and ${others}th case of a test, SEED=$SEED" >&2
  for kind in memcheck racecheck synccheck; do
    sample=$others
    [ "$kind" != memcheck ] || sample=$first
    tool "$kind" "$sample" "$file" "$cases" >"$logs/$name-$kind" 2>&1 &
    jobs="$jobs $kind:$!"
  done
  for job in $jobs; do
    status=0
    wait "${job#*:}" || status=$?
    tail -n 40 "$logs/$name-${job%:*}"
    [ $status -eq 0 ] || failed="$failed $name:${job%:*}($status)"
  done
}

for name in ${*:-triton products large experts int4 tiles few slices attention codes drawn}; do
  case $name in
    triton)
      "$python" tests/gpu/kernel_cases.py --sample "$every"
      group triton test_kernels.py test_kernel "$every" $((every * 4)) ;;
    products) group products test_cuda_kernels.py "test_products or example" $((every * 4)) $((every * 16)) ;;
    large) group large test_large_tiles.py "" 7 15 ;;
    # Cases of a test are in the order of their ops or schedules; the fixed samples have at least one of each op.
    experts) group experts test_cuda_kernels.py experts 4 4 ;;
    int4) group int4 test_cuda_kernels.py "4_bit and not slices and not many" $((every * 4)) $((every * 16)) ;;
    tiles) group tiles test_cuda_kernels.py many_tokens "$every" "$every" ;;
    few) group few test_cuda_kernels.py few_tokens_in_wgmma $((every * 4)) $((every * 16)) ;;
    slices) group slices test_cuda_kernels.py in_slices 24 24 ;;
    attention) group attention test_decode_attention.py "" 2 2 ;;
    codes) group codes test_cuda_expert_codes.py "" 7 7 ;;
    drawn) group drawn test_drawn_shapes.py "" 3 3 ;;
    *) echo "unknown group $name" >&2; exit 2 ;;
  esac
done
[ -n "${LOGS:-}" ] || rm -r "$logs"
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 9; }
