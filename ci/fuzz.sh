#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Draws programs, and holds their closure form against their argument form, for
# MINUTES; each round has another seed. Stops at the first that differs, or that
# takes the process with it, and says the seed.
#
# usage: ci/fuzz.sh MINUTES [FIRST_SEED]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit
fi
if [[ ! "${1:-} ${2:-1}" =~ ^[1-9][0-9]*\ [0-9]+$ || $# -gt 2 ]]; then
  echo 'fuzz.sh: usage: ci/fuzz.sh MINUTES [FIRST_SEED]; see --help' >&2
  exit 2
fi
end=$((SECONDS + 60 * $1))
export FUZZ_EXAMPLES=${FUZZ_EXAMPLES:-25} FUZZ_SEED=${2:-1}

first=$FUZZ_SEED
while ((SECONDS < end)); do
  "$root/ci/run_pytest_cpu.sh" "$root/tests/shard_map_explicit_test.py" -q \
    -k FuzzTest || { echo "FUZZ_SEED=$FUZZ_SEED fails" >&2; exit 1; }
  FUZZ_SEED=$((FUZZ_SEED + 1))
done
echo "$(((FUZZ_SEED - first) * 8 * FUZZ_EXAMPLES)) programs, seeds $first to $((FUZZ_SEED - 1)): the forms agree"
