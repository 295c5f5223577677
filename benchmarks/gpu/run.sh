#!/usr/bin/env bash
# On one Hopper GPU, in at most 9 minutes a call: what FP8 costs and saves against bf16 in the same run, as shares of
# what the chip can do. A record of steps has 40 of a hot chip, its clocks, and the attention that ran.
#   benchmarks/gpu/run.sh --out DIR                   first, then speed (the default)
#   benchmarks/gpu/run.sh --out DIR --only first      what matters most, in 5 minutes: a quick check, and tokens a second
#                                                     and peak memory of each backend
#   benchmarks/gpu/run.sh --out DIR --only steps      compiled steps of a hot chip: a head in FP8 beside a fused loss in
#                                                     bf16, O4, sixteen layers, TransformerEngine, eager
#   benchmarks/gpu/run.sh --out DIR --only speed      optimizers, kernels and Linears
#   benchmarks/gpu/run.sh --out DIR --only right      whether every product, step and wire is right
#   benchmarks/gpu/run.sh --out DIR --only loss       losses of 10.7 million parameters, paired by seed, 15 runs at a time
#   benchmarks/gpu/run.sh --out DIR --only more       further lengths and fields, and messages between ranks
#   benchmarks/gpu/run.sh --out DIR --nproc 1,2,4,8   further GPUs: the table by the number of ranks, over NCCL
# --cpu rehearses every line on a small scale without a GPU; --list prints the parts with their seconds and runs none.
# Prints tables and writes one JSON a question, with chip, versions and date, under DIR; `cp DIR/*_gpu.json
# benchmarks/results` and `benchmarks/tables.py --write` make the tables of them. Exits with 1 if a part failed.
# TorchAO and TransformerEngine are measured where they are installed. Wheels in .te, beside README.rst, are unpacked
# and used, Liger's too, as is a bundle of TransformerEngine there (te_core_py.tar.xz and libte_sm90.so.xz). A part that does not end
# in its time is cut off, and one that no longer fits is left out: both are said, and count as failed.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
root=$(cd "$here/.." && pwd)
out=. cpu= list= only=first,speed nproc=
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out=$2; shift 2 ;;
    --cpu) cpu=1; shift ;;
    --list) list=1; shift ;;
    --only) only=$2; shift 2 ;;
    --nproc) nproc=$2 only=ranks; shift 2 ;;
    *) echo "usage: $0 --out DIR [--cpu] [--list] [--only first|steps|speed|right|loss|more] [--nproc 1,2,4,8]" >&2; exit 2 ;;
  esac
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
python=${PYTHON:-python3}
failed=0
deadline=$((SECONDS + 505))
wanted() { case ",$only," in *",$1,"*) ;; *) return 1 ;; esac; } # a group
part() { # group, seconds, then the command
  local group=$1 limit=$2 left=$((deadline - SECONDS)); shift 2
  [ -n "$cpu" ] && [ -z "$list" ] && limit=600 left=600 # a rehearsal may be slow: nothing is measured
  wanted "$group" || return
  if [ -n "$list" ]; then echo "$group $limit ${*#"$root/"}"; return; fi
  echo; echo "== ${*#"$root/"}"
  if [ "$left" -lt 15 ]; then echo "== not run: no time is left"; failed=1; return; fi
  local start=$SECONDS
  timeout -k 5 "$((limit < left ? limit : left))" "$@"
  local rc=$?
  [ $rc -eq 124 ] && echo "== cut off after $((limit < left ? limit : left)) s"
  [ $rc -ne 0 ] && failed=1
  echo "== $((SECONDS - start)) of $limit s"
}
on() { if [ -n "$cpu" ]; then echo "$2"; else echo "$1"; fi; } # what a GPU takes, what a rehearsal takes
te_part() { # as part, where TransformerEngine imports
  if [ -z "$why_no_te" ]; then part "$@"; return; fi
  wanted "$1" || return
  shift 2; echo; echo "== not run: ${*#"$root/"}: $why_no_te"
}
unpack() { # the wheels in .te, and TransformerEngine's bundle where it is complete
  "$python" - "$root/.te" "$1" <<'P'
import glob, lzma, os, shutil, sys, tarfile, zipfile
bundle, site = sys.argv[1:]
for wheel in glob.glob(f"{bundle}/*.whl"):
    zipfile.ZipFile(wheel).extractall(site)
if os.path.exists(f"{bundle}/te_core_py.tar.xz"):
    tarfile.open(f"{bundle}/te_core_py.tar.xz").extractall(site, filter="data")
    library = f"{site}/transformer_engine/wheel_lib/libtransformer_engine.so"
    with lzma.open(f"{bundle}/libte_sm90.so.xz") as packed, open(library, "wb") as file:
        shutil.copyfileobj(packed, file)
P
}

gpus=1 why_no_te= why_no_ao=
if [ -z "$list" ]; then
  mkdir -p "$out"
  if [ -d "$root/.te" ] && [ -z "$cpu" ]; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    echo "== unpacking .te"
    # TransformerEngine's norms are compiled by NVRTC: NVTE_DISABLE_NVRTC=1 leaves them without a kernel
    unpack "$unpacked" && export PYTHONPATH="$unpacked:$PYTHONPATH"
    # PyTorch's own cuDNN first: another copy on the system makes TransformerEngine's import fail
    ours=$("$python" -c "
import glob, os, torch
site = os.path.dirname(os.path.dirname(torch.__file__))
print(':'.join(path for name in ('cudnn', 'cu13') for path in glob.glob(f'{site}/nvidia/{name}/lib')))" | tail -1)
    [ -n "$ours" ] && export LD_LIBRARY_PATH="$ours${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  fi
  gpus=$("$python" -c "import torch; print(max(1, torch.cuda.device_count()))")
  if [ -n "$cpu" ]; then
    why_no_te=$([ -n "${TE_SITE:-}" ] || echo "TE_SITE names no folder with the packages of tests/te/requirements.txt")
  else
    why_no_te=$("$python" -c "
from fp8_backends import BackendUnavailableError
from fp8_backends.compute.te.backend import load
try:
    load()
    print()
except BackendUnavailableError as error:
    print(error)" | tail -1)
  fi
  why_no_ao=$("$python" -c "
import importlib.util
print('' if importlib.util.find_spec('torchao') else 'TorchAO is not installed, and .te has no wheel of it')" | tail -1)
  [ -n "$why_no_ao" ] && echo "== left out: ao:tensorwise and torchao in every table: $why_no_ao"
  [ -n "$why_no_te" ] && echo "== left out: te in every table: $why_no_te"
fi
ranks() { echo "$python -m torch.distributed.run --standalone --nproc_per_node $(on "$gpus" 2)"; }
standin=$(on "" --standin)
small="--shape tiny --steps 2 --warmup 1 --sequence 32"
steps=$(on "--steps 40 --every 8 --profile --backends" "$small --backends")
eight=$(on "--shape 8b-4layers --sequence 8192 --batch 1" "")
head="?fused_head=True&include=+lm_head"
compared=$(on native:delayed,native:dynamic,msamp:O2 native:dynamic,msamp:O2)
both=$(on eager,compiled "${FORMS:-eager,compiled}")
compiled=$(on compiled "${FORMS:-compiled}")
layers=native:dynamic,native:delayed,native:rowwise,ao:tensorwise,torchao

# first: is it right, and what does a step cost?
part first 60 "$python" "$root/tests/gpu/check.py" --quick $(on "--backends native:dynamic,msamp:O2" "--device cpu --backends native:dynamic") --json "$out/check_quick_gpu.json"
part first 15 "$python" "$here/gpu/sums.py" $(on "" "--device cpu --depths 32") --out "$out"
part first 25 "$python" "$here/gpu/limits.py" $(on "" "--runs 2") --json "$out/limits_gpu.json"
part first 190 "$python" "$here/step.py" --forms $compiled $eight $steps $compared --json "$out/step_8b_gpu.json"

# steps: what a user would feel, the most valuable first; heads, O2 and O4 before te
part steps 150 "$python" "$here/step.py" --forms $compiled $eight $steps "$(on "bf16?liger=True,native:delayed$head,msamp:O2$head,msamp:O4" "native:dynamic$head,msamp:O4")" --json "$out/step_8b_head_gpu.json"
part steps 120 "$python" "$here/step.py" --forms $compiled $eight --layers $(on 16 3) $steps $(on native:delayed,native:dynamic native:dynamic) --json "$out/step_8b_16layers_gpu.json"
part steps 110 "$python" "$here/step.py" --forms $compiled $eight $steps $(on ao:tensorwise,te:delayed ao:tensorwise) --json "$out/step_8b_te_gpu.json"
part steps 90 "$python" "$here/step.py" --forms eager $eight $steps $compared,ao:tensorwise --json "$out/step_8b_eager_gpu.json"

# speed: what else does it cost, and how near is it to what the chip can do?
part speed 35 "$python" "$here/optimizer.py" $(on "" "--elements 65536 --runs 2 --levels O1;O2;O4") --json "$out/optimizer_gpu.json"
part speed 40 "$python" "$here/linear.py" --forms $compiled --linears $(on "8 --shapes llama-gates" "2 --runs 2 --shapes tiny") --backends $layers --json "$out/linear_model_gpu.json"
part speed 20 "$python" "$here/gpu/quantize.py" $(on "" "--runs 2") --json "$out/quantize_gpu.json"
part speed 45 "$python" "$here/linear.py" $(on "--shapes llama --runs 9" "--runs 2 --shapes tiny") --backends $(on te:delayed,te:dynamic,$layers $layers) --json "$out/linear_eager_gpu.json"
part speed 70 "$python" "$here/step.py" --forms $both $(on "--shape 1b --sequence 4096 --batch 2" "") $steps $(on native:delayed,native:dynamic native:dynamic) --json "$out/step_1b_gpu.json"
deadline=$((SECONDS + 20)) # whatever was cut off, what there is is told
part speed 10 "$python" "$here/targets.py" --on gpu "$out"

# more: further lengths, further fields, and the wire
deadline=$((SECONDS + 505))
part more 180 "$python" "$here/step.py" --forms $both $(on "--shape 8b-4layers --sequence 4096 --batch 2" "") $steps $compared --json "$out/step_8b_4096_gpu.json"
part more 130 "$python" "$here/step.py" --forms $both $(on "--shape 1b --sequence 8192 --batch 1" "") $steps $compared --json "$out/step_1b_8192_gpu.json"
part more 65 "$python" "$root/tests/gpu/check.py" --features $(on "" "--device cpu") --json "$out/check_features_gpu.json"
part more 30 "$python" "$here/gpu/one_scale.py" $(on "" "--runs 2") --json "$out/one_scale_gpu.json"
part more 60 $(ranks) "$here/comm.py" $(on "--elements 1048576,67108864" "--runs 2 --elements 65536") --json "$out/comm_gpu.json"

# loss: what does FP8 cost in loss? Records in DIR are extended
little=$(on "" "--steps 2 --seeds 1 --hidden 64 --layers 1 --device cpu --workers 2")
part loss 460 "$python" "$here/scale_loss.py" $(on "--workers 15 --seeds 16 --minutes 7" "$little") --json "$out/scale_loss_gpu.json"

# right: is it right?
part right 60 "$python" "$root/tests/gpu/check.py" $(on "" "--device cpu --backends native:dynamic") --json "$out/check_eager_gpu.json"
te_part right 45 "$python" "$root/tests/te/golden.py" $standin --out "$out"
te_part right 75 "$python" "$root/tests/te/parity.py" --recipe $(on delayed,most_recent,dynamic,blockwise delayed) $standin --json "$out/te_parity.json"
te_part right 40 "$python" "$root/tests/te/parity.py" --mode recompute $standin --json "$out/te_parity_recompute.json"
part right 60 $(ranks) "$root/tests/gpu/wire.py" $(on "" "--device cpu --engines DDP") --json "$out/wire_gpu.json"
part right 90 "$python" "$root/tests/gpu/check.py" --compile $(on "--backends native:dynamic,ao:tensorwise" "--device cpu --backends native:dynamic") --json "$out/check_compiled_gpu.json"
modes="ddp fsdp2 deepspeed"
if wanted right && [ -z "$list$why_no_te" ] && ! "$python" -c "import deepspeed" >/dev/null 2>&1; then
  modes="ddp fsdp2"; echo "== not run: parity under DeepSpeed, which is not installed"
fi
for mode in $modes; do
  te_part right 45 $(ranks) "$root/tests/te/parity.py" --mode $mode $standin --json "$out/te_parity_$mode.json"
done

# ranks: one process a GPU
part ranks 500 "$python" "$here/by_ranks.py" --nproc "${nproc:-1}" $(on "--form compiled" "$small") --backends $(on te:delayed,ao:tensorwise,native:dynamic,msamp:O2,te+msamp:O2 native:dynamic,msamp:O2) --json "$out/by_ranks_gpu.json"

[ -n "$list" ] && exit 0
echo; echo "== $SECONDS s, $([ $failed -eq 0 ] && echo "nothing failed" || echo "something failed: see above")"
exit $failed
