#!/usr/bin/env bash
# On one Hopper GPU, under 9 minutes: first that FP8 is right, then what it costs against bf16 in the same run.
#   benchmarks/gpu/run.sh --out DIR            --cpu rehearses every line on a small scale without a GPU
# Prints tables and writes one JSON a question, with chip, versions and date, under DIR. Exits with 1 if a check failed.
# TorchAO and TransformerEngine are measured where they are installed. A bundle of TransformerEngine in .te, beside
# README.rst (its wheels, te_core_py.tar.xz and libte_sm90.so.xz), is unpacked and used. A part that does not end in its
# time is cut off, and one that no longer fits is left out: both are said, and count as failed.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
root=$(cd "$here/.." && pwd)
out=.
cpu=
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --cpu) cpu=1; shift ;;
    *) echo "usage: $0 --out DIR [--cpu]" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
python=${PYTHON:-python3}
failed=0
deadline=$((SECONDS + 520))
part() { # seconds, then the command
  local limit=$1 left=$((deadline - SECONDS)); shift
  echo; echo "== ${*#"$here/"}"
  if [ "$left" -lt 15 ]; then echo "== not run: no time is left"; failed=1; return; fi
  timeout -k 5 "$((limit < left ? limit : left))" "$@"
  local rc=$?
  [ $rc -eq 124 ] && echo "== cut off after $((limit < left ? limit : left)) s"
  [ $rc -ne 0 ] && failed=1
}
on() { if [ -n "$cpu" ]; then echo "$2"; else echo "$1"; fi; } # what a GPU takes, what a rehearsal takes

if [ -d "$root/.te" ] && [ -z "$cpu" ]; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  echo "== unpacking .te"
  "$python" - "$root/.te" "$unpacked" <<'P' && export PYTHONPATH="$unpacked:$PYTHONPATH" NVTE_DISABLE_NVRTC=1
import glob, lzma, shutil, sys, tarfile, zipfile
bundle, site = sys.argv[1:]
for wheel in glob.glob(f"{bundle}/*.whl"):
    zipfile.ZipFile(wheel).extractall(site)
tarfile.open(f"{bundle}/te_core_py.tar.xz").extractall(site, filter="data")
library = f"{site}/transformer_engine/wheel_lib/libtransformer_engine.so"
with lzma.open(f"{bundle}/libte_sm90.so.xz") as packed, open(library, "wb") as file:
    shutil.copyfileobj(packed, file)
P
fi
why_no_te=$("$python" -c "
from fp8_backends.te_installation import probe
found = probe()
print('' if found else f'{found.reason}. Fix: {found.fix}')" | tail -1)
[ -n "$cpu" ] && why_no_te=$([ -n "${TE_SITE:-}" ] || echo "TE_SITE names no folder with the packages of tests/te/requirements.txt")
te_part() { # as part, where TransformerEngine imports
  if [ -z "$why_no_te" ]; then part "$@"; return; fi
  shift; echo; echo "== not run: ${*#"$here/"}: $why_no_te"
}
gpus=$("$python" -c "import torch; print(max(1, torch.cuda.device_count()))")
ranks() { echo "$python -m torch.distributed.run --standalone --nproc_per_node $(on "$gpus" 2)"; }
standin=$(on "" --standin)
te=$(on te:delayed,te:dynamic,te:blockwise,te+msamp:O2, te:delayed,)
natives=native:dynamic,native:delayed,msamp:O2,ao:tensorwise

# is it right?
part 70 "$python" "$here/gpu/check.py" $(on "" "--device cpu --backends native:dynamic") --out "$out"
te_part 45 "$python" "$here/gpu/golden.py" $standin --out "$out"
te_part 75 "$python" "$here/te/parity.py" --recipe $(on delayed,most_recent,dynamic,blockwise delayed) $standin --json "$out/te_parity.json"
te_part 45 "$python" "$here/te/parity.py" --mode recompute $standin --json "$out/te_parity_recompute.json"
modes="ddp fsdp2 deepspeed"
"$python" -c "import deepspeed" >/dev/null 2>&1 || { modes="ddp fsdp2"; echo "== not run: parity under DeepSpeed, which is not installed"; }
for mode in $modes; do
  te_part 60 $(ranks) "$here/te/parity.py" --mode $mode $standin --json "$out/te_parity_$mode.json"
done
# what does it cost? All in one run
part 110 "$python" "$here/step.py" $(on "--shape 1b" "--steps 2 --warmup 1 --sequence 32") --backends "bf16,$te$natives" --json "$out/step_1b_eager.json"
part 60 $(ranks) "$here/gpu/wire.py" $(on "" "--device cpu --engines DDP") --out "$out"
part 90 "$python" "$here/gpu/check.py" --compile $(on "--backends native:dynamic,ao:tensorwise" "--device cpu --backends native:dynamic") --out "$out"
part 40 "$python" "$here/optimizer.py" $(on "" "--elements 65536 --runs 2") --json "$out/optimizer.json"
part 40 "$python" "$here/linear.py" $(on "" "--runs 2 --shapes tiny") --json "$out/linear_eager.json"
part 110 "$python" "$here/step.py" --compile $(on "--shape 8b-4layers --backends bf16,te:delayed,native:dynamic,ao:tensorwise" "--steps 2 --warmup 1 --sequence 32 --backends native:dynamic") --json "$out/step_8b_compiled.json"
part 60 "$python" "$here/linear.py" --compile $(on "" "--runs 2 --shapes tiny") --json "$out/linear_compiled.json"
echo; echo "== $SECONDS s, $([ $failed -eq 0 ] && echo "nothing failed" || echo "something failed: see above")"
exit $failed
