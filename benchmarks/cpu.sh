#!/usr/bin/env bash
# Every question that a CPU answers, in at most 12 minutes on two quiet cores with bf16 products, and in more without.
#   benchmarks/cpu.sh --out benchmarks/results [--only linear,optimizer]     --small rehearses every line
# Writes one JSON a question, NAME_cpu_FEATURES.json, with chip, versions and date, and prints this machine's targets.
# FEATURES is what `benchmarks/measuring.py` prints, such as avx512_bf16, or avx2 on a CPU without bf16 products, where
# FP32 takes the place of bf16. Then `benchmarks/tables.py --write` writes the tables of benchmarks/README.rst and the
# summary of README.rst. Exits with 1 if a question failed. Longer questions, on demand: memory.py, estimate.py,
# models.py, gradient_mean.py.
#   benchmarks/cpu.sh --levels msamp:O2,msamp:O3 --out benchmarks/results
# answers in place of those, by estimate in 20 minutes for one level and 35 for three, whether these levels lose small
# updates, and where a long run ends. It needs the weights that finetune.py names. `fp8-backends compare` compares their
# losses.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=. small= only= levels=
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --small) small=1; shift ;;
    --levels) levels=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) echo "usage: $0 --out DIR [--only NAME,NAME] [--levels NAME,NAME] [--small]" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
export PYTHONPATH="$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}" CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
features=$("$python" "$here/measuring.py") || exit 1
case $features in *bf16) dtypes=bf16 ;; *) dtypes=fp32,bf16 ;; esac
failed=0
of() { if [ -n "$small" ]; then echo "$2"; else echo "$1"; fi; }
question() { # threads, then the script and its arguments; the record bears the script's name
  local threads=$1 script=$2 start=$SECONDS; shift 2
  case ",${only:-$script}," in *",$script,"*) ;; *) return ;; esac
  echo; echo "== $script.py $*"
  OMP_NUM_THREADS=$threads "$python" "$here/$script.py" "$@" --json "$out/${script}_cpu_$features.json" || failed=1
  echo "== $((SECONDS - start)) s"
}

if [ -n "$levels" ]; then
  question 1 finetune --backends "$levels" --lrs 2e-6,5e-6,2e-5 --steps 120 --batch 8 $(of "" "--lrs 5e-6 --steps 2 --seeds 1")
  question 1 long_run --backends "$levels" $(of "" "--steps 10 --points 2")
  echo "== $SECONDS s"
  exit $failed
fi
question 2 import_time $(of "" "--runs 1")
question 2 linear --dtypes $dtypes --forms $(of eager,compiled eager) $(of "--runs 41" "--shapes tiny --runs 2")
question 2 optimizer $(of "--elements 20000000" "--elements 65536 --runs 2")
question 1 comm $(of "" "--elements 65536 --runs 2")
question 2 overhead $(of "--runs 20" "--runs 2 --instances 1 --hidden 64 --layers 1 --sequence 32")
question 2 prepare $(of "" "--backends native:dynamic,msamp:O3 --layers 20 --width 16 --rounds 2 --meta-layers 1 --large-layers 3 --large-width 64")
question 2 step --together $(of "" "--shape tiny --steps 2 --warmup 1 --sequence 32")
question 1 by_ranks $(of "--backends native:dynamic,ao:tensorwise,msamp:O2" "--backends native:dynamic --shape tiny --steps 2 --warmup 1 --sequence 32")
echo
"$python" "$here/targets.py" "$out"
echo "== $SECONDS s, $([ $failed -eq 0 ] && echo "nothing failed" || echo "something failed: see above")"
exit $failed
