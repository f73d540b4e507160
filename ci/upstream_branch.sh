#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Turns the patches into a commit on a new branch of a JAX git checkout, ready
# for review: the patched files, the tests with their targets in tests/BUILD, an
# entry in CHANGELOG.md, and the superseded upstream test replaced; the texts
# are in ci/upstream. The branch appears with its commit or not at all; nothing
# is pushed.
#
# usage: ci/upstream_branch.sh [--branch NAME] [--release V] [--reject] CHECKOUT
#
#   --branch NAME  default: shard-map-close-over-explicit
#   --release V    whose patches (default: the release that CHECKOUT is at,
#                  else the newest)
#   --reject       where hunks do not apply, make the branch all the same,
#                  with what applies in the work tree and the rest in .rej files
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
branch=shard-map-close-over-explicit release='' reject='' checkout=''

die() {
  echo "upstream_branch.sh: $*" >&2
  exit 2
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --branch | --release)
      [[ -n ${2:-} ]] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --reject) reject=yes && shift ;;
    -h | --help) sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    -*) die "unknown argument $1; see --help" ;;
    *)
      [[ -z $checkout ]] || die "unknown argument $1; see --help"
      checkout=$1
      shift
      ;;
  esac
done
[[ $(git check-ref-format --branch "$branch" 2>/dev/null) == "$branch" ]] ||
  die "$branch cannot name a branch"
[[ -n $checkout ]] || die 'which checkout? see --help'
[[ -d $checkout ]] || die "no such directory: $checkout"
checkout=$(cd "$checkout" && pwd -P)

in_checkout() { git -C "$checkout" "$@"; }

[[ $(in_checkout rev-parse --show-toplevel 2>/dev/null) == "$checkout" ]] ||
  die "$checkout is not the top of a git checkout"
for file in jax/version.py tests/BUILD tests/shard_map_test.py CHANGELOG.md; do
  [[ -f $checkout/$file ]] || die "$checkout is not JAX: it has no $file"
done
[[ -z $(in_checkout status --porcelain) ]] ||
  die "$checkout has changes; commit or stash them"
# Of a/b and a, or a/b/c, there can be only one.
while read -r taken; do
  [[ $branch/ != "$taken"/* && $taken/ != "$branch"/* ]] ||
    die "$checkout has a branch $taken already; see --branch"
done < <(in_checkout for-each-ref --format='%(refname:lstrip=2)' refs/heads)
in_checkout var GIT_AUTHOR_IDENT >/dev/null 2>&1 ||
  die 'git knows no user.name and user.email to commit as'

# The patches of the release that this is, else those of the newest.
patches=$(python3 - "$root" "$release" "$(
  python3 "$root/ci/jax_patch.py" status "$checkout" 2>&1 || true)" <<'END'
import json
import pathlib
import re
import sys

root, wanted, status = sys.argv[1:]
releases = json.loads(
    (pathlib.Path(root) / 'ci' / 'releases.json').read_text())['releases']
at = re.match('stock: JAX ([0-9.]+)', status)
wanted = wanted or at and at[1] or max(
    (r['version'] for r in releases),
    key=lambda v: [int(x) for x in v.split('.')])
for r in releases:
  if r['version'] == wanted:
    print(pathlib.Path(root) / r['patches'])
END
)
[[ -n $patches ]] || die "no patches for JAX $release"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_INDEX_FILE=$work/index
in_checkout read-tree HEAD

cd "$patches"
files=() failed=() edited=()
while read -r file; do
  files+=("${file%.patch}")
done < <(find jax -name '*.patch' | sort)
for file in "${files[@]}"; do
  if [[ -z $(in_checkout ls-files -- "$file") ]]; then
    failed+=("$file")
    echo "$file: not in this JAX" >&2
  elif in_checkout apply --cached --whitespace=nowarn -v \
    "$patches/$file.patch" 2>"$work/said"; then
    grep offset "$work/said" | sed "s|^|$file: |" || true
  else
    failed+=("$file")
    mkdir -p "$work/try/${file%/*}"
    in_checkout show "HEAD:$file" >"$work/try/$file"
    (cd "$work/try" && GIT_CEILING_DIRECTORIES=$work git apply -v --reject \
      "$patches/$file.patch" 2>&1 || true) | grep -E 'patch failed|No such' >&2 || true
  fi
done

if [[ ${#failed[@]} -gt 0 ]]; then
  [[ -n $reject ]] ||
    die "the patches do not apply to ${failed[*]}, see above;" \
      'no branch is made'
  unset GIT_INDEX_FILE
  in_checkout switch -q -c "$branch"
  for file in "${files[@]}"; do
    in_checkout apply --reject "$patches/$file.patch" 2>/dev/null || true
  done
  die "the patches do not apply, see above; what is left of them is in .rej" \
    "files on $branch"
fi

# The other files, and the patched ones for ruff.
mkdir "$work/tree"
pjit_test=$(in_checkout ls-files -- tests/pjit_test.py)
in_checkout checkout-index --prefix="$work/tree/" -- pyproject.toml \
  CHANGELOG.md tests/BUILD tests/shard_map_test.py ${pjit_test:+"$pjit_test"} \
  "${files[@]}"
for test in "$root"/tests/*_test.py; do
  ! in_checkout cat-file -e "HEAD:tests/${test##*/}" 2>/dev/null ||
    die "$checkout has tests/${test##*/} already"
done
python3 "$root/ci/upstream/edit.py" "$work/tree" >"$work/edited" 2>"$work/said" ||
  die "$(tail -1 "$work/said")"
while read -r file; do
  edited+=("$file")
  blob=$(in_checkout hash-object -w --path="$file" "$work/tree/$file")
  in_checkout update-index --add --cacheinfo "100644,$blob,$file"
done <"$work/edited"

ruff=$(command -v ruff "$root/.venv/bin/ruff" | head -1) || true
if [[ -n $ruff ]]; then
  (cd "$work/tree" && "$ruff" check --no-cache -q . ) ||
    echo 'ruff has findings in the changed files, see above.'
else
  echo 'ruff is not installed; the changed files were not checked with it.'
fi

# Objects of other files may be absent in a partial clone.
tree=$(in_checkout write-tree --missing-ok)
commit=$(in_checkout commit-tree -p HEAD -F "$root/ci/upstream/commit_message.txt" \
  "$tree")
unset GIT_INDEX_FILE
in_checkout branch "$branch" "$commit"
in_checkout switch -q "$branch"

tests=$(printf '%s\n' "${edited[@]}" | grep '_test\.py$' | tr '\n' ' ')
targets=$(for test in $tests; do
  test=${test##*/}
  printf '//tests:%s_cpu ' "${test%.py}"
done)
cat <<END
Branch $branch of $checkout. To review and test it:

  cd $checkout
  git show --stat
  git show
  JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m pytest -n auto $tests
  bazel test --test_env=JAX_NUM_CPU_DEVICES=8 $targets
  pre-commit run --from-ref HEAD~ --to-ref HEAD
END
