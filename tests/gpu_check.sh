#!/usr/bin/env bash
# What only a GPU can show, in at most six minutes: the tests that need one, a shortened quickstart, steps and rounds
# beside their uncompiled form, features made beside the step and in turn, peak memory, and two processes where there are two GPUs.
#
#   tests/gpu_check.sh [PYTHON]      default: .venv/bin/python, which `make install` makes
#
# Ends with 0 if everything passed, 1 if something failed or was not reached in time, 2 if there is no GPU. What the
# steps print goes to the folder that the last line names.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
budget=${GPU_CHECK_SECONDS:-360}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || { echo "$python cannot import torch" >&2; exit 2; }
if ((gpus == 0)); then
  echo 'no GPU: nothing was checked' >&2
  exit 2
fi
out=$(mktemp -d)
failed=()

# step NAME SECONDS WORDS...: run python with WORDS, for at most SECONDS and at most what is left of the budget.
step() {
  local name=$1 limit=$2 left=$((budget - SECONDS)) begin=$SECONDS
  if ((left <= 0)); then
    echo "NOT REACHED  $name"
    failed+=("$name")
    return
  fi
  if timeout --kill-after=10 "$((limit < left ? limit : left))" "$python" "${@:3}" >"$out/$name.txt" 2>&1; then
    echo "ok      $name ($((SECONDS - begin)) s)"
  else
    echo "FAILED  $name ($((SECONDS - begin)) s), its last lines:"
    tail -n 15 "$out/$name.txt"
    failed+=("$name")
  fi
}

dflash=(-m dflash_lightning)
bench=("${dflash[@]}" bench --device cuda --dtype bfloat16)
quick=(fit quickstart trainer=gpu trainer.devices=1 data.limit=96 trainer.max_epochs=-1 trainer.max_steps=40
  callbacks.speculative_eval.every_n_steps=40 decoding.max_new_tokens=16)
echo "$gpus GPU(s); at most $budget s; output in $out"
step tests 150 -m pytest -q -m compiled tests/test_cuda.py
step quickstart 90 "${dflash[@]}" "${quick[@]}" run_dir="$out/quickstart"
step step 45 "${bench[@]}" step --batch 4 --json "$out/step.json"
step prefetch 60 tests/measure_prefetch.py --device cuda
step decode_eager 45 "${bench[@]}" decode --json "$out/decode_eager.json"
step decode_compiled 90 "${bench[@]}" decode --compiled --json "$out/decode_compiled.json"
if ((gpus >= 2)); then
  step two_gpus 90 "${dflash[@]}" "${quick[@]}" trainer=ddp trainer.devices=2 run_dir="$out/two_gpus"
else
  echo 'left out  two_gpus: there is one'
fi
for name in step prefetch decode_eager decode_compiled; do  # seconds, shares and peak memory
  [[ -f $out/$name.txt ]] && tail -n 25 "$out/$name.txt"
done
if ((${#failed[@]})); then
  echo "failed or not reached: ${failed[*]} (output in $out)" >&2
  exit 1
fi
echo "passed in $SECONDS s (output in $out)"
