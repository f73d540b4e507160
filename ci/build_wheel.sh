#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds dist/jax-<VERSION>+explicit.<REVISION>-py3-none-any.whl from the sdist
# of a release and the patches. It requires the jaxlib of that release exactly,
# and its extras "ci" and "minimum-jaxlib", which ask for another, are empty. The
# same input gives the same bytes. jax/ in it is what `jax_patch.py apply`
# makes, so jax.__version__ stays VERSION, which jaxlib and plugins compare
# theirs with; importlib.metadata.version('jax') tells the wheels apart.
#
# usage: ci/build_wheel.sh [VERSION]
#
# Environment: DIST (default: dist in this repository), SOURCE_DATE_EPOCH, and
# PYTHON (default: python3), any version that pip and jax_patch.py run on.
set -euo pipefail

die() {
  echo "build_wheel.sh: $*" >&2
  exit 2
}

case ${1-default} in
  -h | --help) sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
  -*) die "unknown argument $1; see --help" ;;
  '') die 'VERSION is empty; see --help' ;;
esac
[[ $# -le 1 ]] || die "unknown argument $2; see --help"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dist=${DIST:-$root/dist}
python=${PYTHON:-python3}
setuptools=80.9.0
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-315532800} # 1980, as in zips.
export PIP_DISABLE_PIP_VERSION_CHECK=${PIP_DISABLE_PIP_VERSION_CHECK:-1}
umask 022

"$python" -c 'import sys, pip; assert sys.version_info >= (3, 9)' \
  >/dev/null 2>&1 || die "$python is no Python 3.9 or newer with pip"
mkdir -p "$dist" 2>/dev/null || die "cannot make $dist"
[[ -w $dist ]] || die "no permission to write $dist"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" "$root/ci/jax_patch.py" open ${1:+--release "$1"} "$work/jax"

"$python" - "$root/ci/releases.json" "$work/jax" $setuptools <<'END'
import json
import pathlib
import re
import sys

data = json.loads(pathlib.Path(sys.argv[1]).read_text())
tree = pathlib.Path(sys.argv[2])
version = next(line for line in (tree / 'PKG-INFO').read_text().splitlines()
               if line.startswith('Version: ')).split()[1]
release = next(r for r in data['releases'] if r['version'] == version)


def replace(name, old, new):
  text = (tree / name).read_text()
  if text.count(old) != 1:
    sys.exit(f'build_wheel.sh: {name} of JAX {version} has no {old!r}')
  (tree / name).write_text(text.replace(old, new))


replace('setup.py', '_version_module._get_version_for_build()',
        f'"{version}+explicit.{data["revision"]}"')
replace('setup.py', "f'jaxlib >={_minimum_jaxlib_version}, <={_jax_version}'",
        f"'jaxlib =={release['jaxlib']}'")
text = (tree / 'setup.py').read_text()
(tree / 'setup.py').write_text(
    re.sub(r"^( *'(?:ci|minimum-jaxlib)': )\[.*\],$", r'\1[],', text,
           flags=re.M))
replace('pyproject.toml', 'requires = ["setuptools", "wheel"]',
        f'requires = ["setuptools=={sys.argv[3]}"]')
END

"$python" -m pip wheel -q --no-deps --ignore-requires-python --no-cache-dir \
  -w "$work/dist" "$work/jax"
for wheel in "$work"/dist/*.whl; do
  mv "$wheel" "$dist/"
  echo "built: $dist/${wheel##*/}"
done
