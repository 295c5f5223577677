#!/usr/bin/env bash
# On one Hopper GPU, under 10 minutes: first that FP8 is right, then what it costs against bf16 in the same run.
#   benchmarks/gpu/run.sh --out DIR
# Prints tables and writes one JSON a question, with chip, versions and date, under DIR. Exits with 1 if a check failed.
# TorchAO is measured where it is installed; a part that does not end in its time is cut off and said so.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
out=.
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    *) echo "usage: $0 --out DIR" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
failed=0
part() { # seconds, then the command
  local limit=$1; shift
  echo; echo "== ${*#"$here/"}"
  timeout "$limit" "$@"
  local rc=$?
  [ $rc -eq 124 ] && echo "== cut off after $limit s"
  [ $rc -ne 0 ] && failed=1
}
python=${PYTHON:-python3}
part 90 "$python" "$here/gpu/check.py" --out "$out"
part 120 "$python" "$here/gpu/check.py" --compile --backends native:dynamic,native:delayed,ao:tensorwise --out "$out"
gpus=$("$python" -c "import torch; print(max(1, torch.cuda.device_count()))")
part 90 "$python" -m torch.distributed.run --standalone --nproc_per_node "$gpus" "$here/gpu/wire.py" --out "$out"
part 60 "$python" "$here/optimizer.py" --json "$out/optimizer.json"
part 50 "$python" "$here/linear.py" --json "$out/linear_eager.json"
part 80 "$python" "$here/linear.py" --compile --json "$out/linear_compiled.json"
part 70 "$python" "$here/step.py" --shape 1b --json "$out/step_1b_eager.json"
part 120 "$python" "$here/step.py" --shape 8b-4layers --compile --backends bf16,native:dynamic,ao:tensorwise --json "$out/step_8b_compiled.json"
exit $failed
