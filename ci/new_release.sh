#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Adds a JAX release to ci/releases.json, with the patches of the next older or
# newer release if they apply; else reports what does not and leaves a tree to
# finish. Releases with the same patches share a directory: jax/ if the newest
# of all is among them, else backports/VERSION of the newest among them.
#
# usage: ci/new_release.sh VERSION [TREE [--drop PATH]...]
#
#   TREE         the patched source tree of that release, finished by hand
#   --drop PATH  a file, as jax/_src/core.py, that needs no patch in that release
#
# Environment: PYTHON (default: python3), any version that jax_patch.py runs on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
version='' tree='' drop=()

die() {
  echo "new_release.sh: $*" >&2
  exit 2
}

while [[ $# -gt 0 ]]; do
  case $1 in
    -h | --help) sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    --drop)
      [[ -n ${2:-} ]] || die "$1 needs a value"
      drop+=("$1" "$2")
      shift
      ;;
    -*) die "unknown argument $1; see --help" ;;
    *)
      if [[ -z $version ]]; then
        version=$1
      elif [[ -z $tree ]]; then
        tree=$1
      else
        die "unknown argument $1; see --help"
      fi
      ;;
  esac
  shift
done
[[ $version =~ ^[0-9]+(\.[0-9]+)+$ ]] ||
  die "${version:-''} is not a version; see --help"
[[ -n $tree || ${#drop[@]} == 0 ]] || die '--drop is for a TREE; see --help'
[[ $python != */* ]] || python=$(cd "${python%/*}" && pwd)/${python##*/} ||
  die "no such Python: $PYTHON"
"$python" -m pip --version >/dev/null 2>&1 || die "$python does not run pip"
if [[ -n $tree ]]; then
  [[ -d $tree ]] || die "no such directory: $tree"
  tree=$(cd "$tree" && pwd)
fi
cache=${JAX_PATCH_CACHE:-$root/.cache}
[[ $cache == /* ]] || cache=$PWD/$cache
port=$root/build/port-$version

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$cache" "$work/sdist" "$work/root/backports"

# All is done on a copy, so that a failure changes nothing.
cp -R "$root/ci" "$root/jax" "$work/root/"
[[ ! -d $root/backports ]] || cp -R "$root/backports" "$work/root/"
export JAX_PATCH_ROOT=$work/root JAX_PATCH_CACHE=$cache
cd "$work/root"

prelude='
import sys
sys.path.insert(0, "ci")
import jax_patch

def hook(kind, e, traceback):
  if kind is not jax_patch.Refusal:
    return sys.__excepthook__(kind, e, traceback)
  print(f"new_release.sh: {e}", file=sys.stderr)

sys.excepthook = hook
'
# Runs the Python program on stdin; a refusal in it ends this script.
run_python() {
  { echo "$prelude" && cat; } | "$python" -B - "$@" || exit 2
}

# The patches to try, and what is wrong before anything is downloaded.
run_python "$version" "$tree" >"$work/try" <<'END'
version, tree = sys.argv[1:]
data = jax_patch._Data()
versions = [r['version'] for r in data.releases]
if version in versions:
  raise jax_patch.Refusal(f'releases.json has JAX {version} already')
if tree:
  root = jax_patch._locate(tree)
  if jax_patch._version(root) != version:
    raise jax_patch.Refusal(
        f'{tree} is JAX {jax_patch._version(root)}, not {version}')
  jax_patch._check_finished(root)
newer = [r['patches'] for r in data.releases
         if jax_patch._numbers(r['version']) > jax_patch._numbers(version)]
older = [r['patches'] for r in data.releases[len(newer):]]
print(*dict.fromkeys(older[:1] + newer[-1:]), sep='\n')
END
[[ -n $tree || ! -e $port ]] ||
  die "$port is there: finish it and give it as TREE, or remove it"

"$python" -m pip download -q --no-deps --no-binary=jax --ignore-requires-python \
  -d "$work/sdist" "jax==$version" >"$work/log" 2>&1 ||
  die "cannot download JAX $version:" \
    "$( (grep -m1 ^ERROR "$work/log" || tail -1 "$work/log") |
      sed 's/ (from versions.*//')"
cp "$work"/sdist/jax-*.tar.gz "$cache/"
run_python "$version" "$work"/sdist/jax-*.tar.gz >/dev/null <<'END'
import hashlib
import pathlib
import re
import tarfile
version, sdist = sys.argv[1], pathlib.Path(sys.argv[2])
with tarfile.open(sdist) as tar:
  info = tar.extractfile(f'jax-{version}/PKG-INFO').read().decode()
data = jax_patch._Data()
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

# Makes $work/$version a tree with the patches of a directory; says in $work/said
# what does not apply.
try() {
  local patch file
  rm -rf "${work:?}/$version" "backports/$version"
  mkdir "backports/$version"
  cp -R "$1/jax" "backports/$version/"
  "$python" ci/jax_patch.py open --stock --release "$version" \
    "$work/$version" >/dev/null
  : >"$work/offsets"
  : >"$work/said"
  while read -r patch; do
    file=${patch%.patch}
    if [[ ! -e $work/$version/$file ]]; then
      echo "$file: not in this JAX" >>"$work/said"
      continue
    fi
    (cd "$work/$version" && GIT_CEILING_DIRECTORIES=$work git apply -v --reject \
      "$work/root/backports/$version/$patch") >"$work/log" 2>&1 ||
      { grep 'patch failed' "$work/log" || tail -1 "$work/log"; } |
      sed "s|^|$file: |" >>"$work/said"
    grep offset "$work/log" | sed "s|^|$file: |" >>"$work/offsets" || true
  done < <(cd "$1" && find jax -name '*.patch' | sort)
}

# Of two neighbors, the one of whose patches the most apply.
best='' fewest=''
while read -r nearest; do
  try "$nearest"
  failed=$(wc -l <"$work/said")
  if [[ -z $best ]] || ((failed < fewest)); then
    best=$nearest fewest=$failed
  fi
  ((failed)) || break
done <"$work/try"
if [[ $best != "$nearest" ]]; then
  try "$best"
fi
if [[ -z $tree ]]; then
  tree=$work/$version
  cat "$work/offsets" "$work/said"
  if ((fewest)); then
    mkdir -p "${port%/*}"
    mv "$tree" "$port"
    die "finish the patched tree $port (see its .rej files), then run" \
      "ci/new_release.sh $version $port, with --drop FILE for each file that" \
      'needs no patch any more'
  fi
fi
"$python" ci/jax_patch.py refresh --release "$version" \
  ${drop[@]+"${drop[@]}"} "$tree"

# Lays out the directories anew, by the diffs that releases share.
run_python "$version" <<'END'
import json
import pathlib
import shutil
version, = sys.argv[1:]
data = json.loads(pathlib.Path('ci/releases.json').read_text())
releases = data['releases']  # Newest first.
groups = {}
for r in releases:
  diffs = {p.relative_to(r['patches']): p.read_bytes()[
      len(jax_patch._header(p)):]
           for p in pathlib.Path(r['patches'], 'jax').rglob('*.patch')}
  groups.setdefault(frozenset(diffs.items()), []).append(r)
for members in groups.values():
  # The headers are those of a release that was there before.
  source = next((r for r in members if r['version'] != version), members[0])
  name = ('.' if members[0] is releases[0] else
          f'backports/{members[0]["version"]}')
  shutil.copytree(pathlib.Path(source['patches'], 'jax'),
                  pathlib.Path('new', name, 'jax'))
  for r in members:
    r['new'] = name
for r in releases:
  r['patches'] = r.pop('new')
  if r['version'] == version:
    print(f'added: JAX {version}, patches in {r["patches"]}')
pathlib.Path('ci/releases.json').write_text(json.dumps(data, indent=2) + '\n')
END

rm -rf "$root/jax" "$root/backports"
cp -R new/. "$root/"
cp ci/releases.json "$root/ci/"
echo "Now test it: ci/setup.sh --jax $version --venv DIR, and note in" \
  'releases.json what was tested.'
