#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests on CPU with a patched JAX, set up if need be by ci/setup.sh,
# whose environment variables hold here too.
#
# usage: ci/run_pytest_cpu.sh [PYTEST ARGUMENTS]
#
# Test files named replace tests/; they may be relative to this repository.
# JAX_PATCH_JOBS is the number of processes (default: one per core).
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${JAX_PATCH_VENV:-$root/.venv}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:-8}

"$root/ci/setup.sh" --no-example

args=() paths=no last=
for arg in "$@"; do
  if [[ $arg != -* && ! $last =~ ^-[a-zA-Z]$ ]]; then # Not an option's value.
    file=${arg%%::*}
    if [[ ! -e $file && -e $root/$file ]]; then
      arg=$root/$arg
    fi
    [[ ! -e ${arg%%::*} ]] || paths=yes
  fi
  args+=("$arg")
  last=$arg
done
[[ $paths == yes ]] || args+=("$root/tests")

exec "$venv/bin/python" -m pytest -n "${JAX_PATCH_JOBS:-auto}" \
  --rootdir "$root" "${args[@]}"
