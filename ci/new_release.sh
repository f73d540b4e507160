#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Adds a JAX release to ci/releases.json, with the patches of the nearest
# release if they apply; else reports what does not and leaves a tree to finish.
# The newest release's patches are in jax/, others' in backports/VERSION, unless
# they are the same as another's.
#
# usage: ci/new_release.sh VERSION [TREE]
#
#   TREE  the patched source tree of that release, finished by hand
#
# Environment: PYTHON (default: python3), any version that jax_patch.py runs on.
set -euo pipefail

if [[ $# -lt 1 || $# -gt 2 || $1 == -* ]]; then
  sed -n '4,/^set/s/^# \{0,1\}//p' "$0"
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=$1 tree=${2:-}
python=${PYTHON:-python3}
cache=${JAX_PATCH_CACHE:-$root/.cache}
port=$cache/port-$version

die() {
  echo "new_release.sh: $*" >&2
  exit 2
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$cache" "$work/sdist" "$work/root/backports"
"$python" -m pip download -q --no-deps --no-binary=jax --ignore-requires-python \
  -d "$work/sdist" "jax==$version" >"$work/log" 2>&1 ||
  die "cannot download JAX $version: $(grep -m1 ^ERROR "$work/log")"
cp "$work"/sdist/jax-*.tar.gz "$cache/"

# All is done on a copy, so that a failure changes nothing.
cp -R "$root/ci" "$root/jax" "$work/root/"
[[ ! -d $root/backports ]] || cp -R "$root/backports" "$work/root/"
export JAX_PATCH_ROOT=$work/root JAX_PATCH_CACHE=$cache
cd "$work/root"
nearest=$("$python" - "$version" "$work"/sdist/jax-*.tar.gz <<'END'
import hashlib
import json
import pathlib
import re
import sys
import tarfile

sys.path.insert(0, 'ci')
import jax_patch

version, sdist = sys.argv[1], pathlib.Path(sys.argv[2])
with tarfile.open(sdist) as tar:
  info = tar.extractfile(f'jax-{version}/PKG-INFO').read().decode()
data = jax_patch._Data()
if any(r['version'] == version for r in data.releases):
  sys.exit(f'new_release.sh: releases.json has JAX {version} already')
print(data.nearest(version)['patches'])
data.json['releases'].append(dict(
    version=version,
    sdist=sdist.name,
    sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(),
    jaxlib=re.search(r'^Requires-Dist: jaxlib.*<=([\d.]+)', info, re.M)[1],
    python=re.search(r'^Requires-Python: (.*)', info, re.M)[1],
    patches=f'backports/{version}',
    tested='not yet',
    files={}))
data.json['releases'].sort(
    key=lambda r: jax_patch._numbers(r['version']), reverse=True)
data.save()
END
) || exit 2
nearest=${nearest%%$'\n'*}

mkdir "backports/$version"
cp -R "$nearest/jax" "backports/$version/"
if [[ -z $tree ]]; then
  tree=$work/$version
  ci/jax_patch.py open --stock --release "$version" "$tree" >/dev/null
  status=0
  (cd "backports/$version" && find jax -name '*.patch') | sort >"$work/patches"
  while read -r patch; do
    (cd "$tree" && GIT_CEILING_DIRECTORIES=$work git apply -v --reject \
      "$work/root/backports/$version/$patch") >"$work/log" 2>&1 || status=1
    grep -E 'patch failed|offset|No such' "$work/log" | sed "s|^|${patch%.patch}: |" || true
  done <"$work/patches"
  if [[ $status != 0 ]]; then
    rm -rf "$port"
    mv "$tree" "$port"
    die "finish the patched tree $port (see its .rej files), then run" \
      "ci/new_release.sh $version $port"
  fi
fi
ci/jax_patch.py refresh --release "$version" "$tree"

# Names the directory: shared, the top if it is the newest, or its own.
"$python" - "$version" "$nearest" <<'END'
import json
import pathlib
import shutil
import sys

version, nearest = sys.argv[1:]
own = f'backports/{version}'
data = json.loads(pathlib.Path('ci/releases.json').read_text())
releases = data['releases']
this = next(r for r in releases if r['version'] == version)


def patches(directory):
  return {p.relative_to(directory): p.read_bytes()
          for p in pathlib.Path(directory, 'jax').rglob('*.patch')}


if patches(own) == patches(nearest):
  this['patches'] = nearest
  shutil.rmtree(own)
elif this is releases[0]:
  before = f'backports/{releases[1]["version"]}'
  for r in releases:
    if r['patches'] == '.':
      r['patches'] = before
  this['patches'] = '.'
  pathlib.Path(before).mkdir()
  shutil.move('jax', f'{before}/jax')
  shutil.move(f'{own}/jax', 'jax')
  pathlib.Path(own).rmdir()
pathlib.Path('ci/releases.json').write_text(json.dumps(data, indent=2) + '\n')
print(f'added: JAX {version}, patches in {this["patches"]}')
END
rmdir backports 2>/dev/null || true

rm -rf "$root/jax" "$root/backports"
cp -R jax "$root/"
[[ ! -d backports ]] || cp -R backports "$root/"
cp ci/releases.json "$root/ci/"
echo "Now test it: ci/setup.sh --jax $version --venv DIR, and note in" \
  'releases.json what was tested.'
