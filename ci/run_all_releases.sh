#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests on releases of JAX, each in an environment of its own that
# ci/setup.sh makes, and prints a table of what passed, failed, and was skipped
# for which reasons.
#
# usage: ci/run_all_releases.sh [VERSION...] [-- PYTEST ARGUMENTS]
#
# Default: all releases that `ci/jax_patch.py list` lists. Exit status 1 if a
# release failed, or was not set up.
#
# Environment: JAX_PATCH_RELEASES_DIR, the directory of the environments and
# results (default: .releases in this repository), and that of ci/setup.sh.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dir=${JAX_PATCH_RELEASES_DIR:-$root/.releases}
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
versions=()
while [[ $# -gt 0 && $1 != -- ]]; do
  if [[ $1 == -* ]]; then
    echo "run_all_releases.sh: unknown argument $1; see --help" >&2
    exit 2
  fi
  versions+=("$1")
  shift
done
[[ $# -eq 0 ]] || shift
if [[ ${#versions[@]} -eq 0 ]]; then
  while read -r version; do
    versions+=("$version")
  done < <("$root/ci/jax_patch.py" list |
    sed -n 's/^JAX \([0-9.]*\),.*/\1/p')
fi

for version in "${versions[@]}"; do
  echo "JAX $version"
  rm -f "$dir/$version.xml"
  export JAX_PATCH_JAX=$version JAX_PATCH_VENV=$dir/$version
  # Stock JAX, for the test that shows what it does.
  stock=$dir/$version-stock
  if "$root/ci/setup.sh" --no-example; then
    [[ -d $stock ]] || "$JAX_PATCH_VENV/bin/python" "$root/ci/jax_patch.py" \
      open --stock --release "$version" "$stock"
    JAX_STOCK=$stock "$root/ci/run_pytest_cpu.sh" -q --tb=short \
      --junitxml "$dir/$version.xml" "$@" || true
  fi
done

python=$(command -v python3 || echo "$JAX_PATCH_VENV/bin/python")
exec "$python" - "$dir" "${versions[@]}" <<'END'
import collections
import pathlib
import sys
import xml.etree.ElementTree as ET

directory, *versions = sys.argv[1:]
status = 0
reasons = {}
print('\n| JAX | passed | skipped | failed |\n|---|---|---|---|')
for version in versions:
  try:
    tree = ET.parse(pathlib.Path(directory, f'{version}.xml'))
  except FileNotFoundError:
    print(f'| {version} | not set up, or no tests ran | | |')
    status = 1
    continue
  counts = collections.Counter()
  reasons[version] = collections.Counter()
  for case in tree.iter('testcase'):
    skip = case.find('skipped')
    bad = case.find('failure') is not None or case.find('error') is not None
    counts['failed' if bad else 'passed' if skip is None else 'skipped'] += 1
    if skip is not None and not bad:
      reasons[version][skip.get('message')] += 1
  print(f'| {version} |', ' | '.join(
      str(counts[k]) for k in ('passed', 'skipped', 'failed')), '|')
  if counts['failed'] or not counts['passed']:
    status = 1
for version, why in reasons.items():
  for reason, n in why.most_common():
    print(f'\n{version}: {n} skipped: {reason}', end='')
print()
sys.exit(status)
END
