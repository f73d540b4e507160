#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs BlackJAX 1.7.1's LAPS sampler, whose kernel closes over an array of an
# earlier step (its issue 932), on an Explicit mesh of two devices: with stock
# JAX it fails, with the patches it runs unchanged and equals the run on an Auto
# mesh. Then runs the other examples that need a package. Takes a few minutes.
#
# usage: ci/run_clients.sh [RELEASE]
#
#   RELEASE  of JAX, as listed by `ci/jax_patch.py list` (default: the newest
#            that a Python found suits, as of ci/setup.sh)
#
# Environment: JAX_PATCH_CLIENTS_VENV (default: .cache/clients in this
# repository), and ci/setup.sh's JAX_PATCH_PYTHON.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit
fi
if [[ ${1:-} == -* || $# -gt 1 ]]; then
  echo "run_clients.sh: unknown argument ${2:-$1}; see --help" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${JAX_PATCH_CLIENTS_VENV:-$root/.cache/clients}
python=$venv/bin/python
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4

"$root/ci/setup.sh" ${1:+--jax "$1"} --venv "$venv" --no-example
jax=${1:-$("$python" "$root/ci/jax_patch.py" pick | cut -d' ' -f1)}
# `jax==` keeps pip from replacing the patched release.
"$python" -m pip install -q --disable-pip-version-check \
  "jax==$jax" blackjax==1.7.1 optax==0.2.8

"$root/ci/jax_patch.py" revert "$python"
if "$python" "$root/examples/laps_blackjax.py" >"$log" 2>&1; then
  echo 'run_clients.sh: LAPS runs with stock JAX; nothing is shown' >&2
  exit 1
fi
error='NotImplementedError: Closing over inputs to shard_map where the input is'
if ! grep "^$error" "$log"; then
  echo 'run_clients.sh: LAPS fails with stock JAX, but otherwise:' >&2
  tail "$log" >&2
  exit 1
fi
echo 'ok: LAPS fails with stock JAX'

"$root/ci/jax_patch.py" apply "$python"
for example in "$root"/examples/{laps_blackjax,train_step_optax}.py; do
  echo "${example##*/}:"
  "$python" "$example"
done
echo 'ok: the clients run with the patches'
