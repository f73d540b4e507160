#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes an environment that has a patched JAX and what its tests need, and runs
# the example in it. Run again, it only redoes what is no longer right.
#
# usage: ci/setup.sh [--jax VERSION] [--venv DIR] [--python PYTHON]
#                    [--no-example]
#
#   --jax VERSION    a release listed by `ci/jax_patch.py list` (default:
#                    $JAX_PATCH_JAX, else the newest that a Python found suits)
#   --venv DIR       default: $JAX_PATCH_VENV, else .venv in this repository
#   --python PYTHON  default: $JAX_PATCH_PYTHON, else the first that suits the
#                    newest release of python3, python3.x, pyenv's and uv's
#   --no-example     do not run the example
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jax=${JAX_PATCH_JAX:-}
venv=${JAX_PATCH_VENV:-$root/.venv}
python=${JAX_PATCH_PYTHON:-}
example=$root/examples/close_over_explicit_mesh.py
export PIP_DISABLE_PIP_VERSION_CHECK=${PIP_DISABLE_PIP_VERSION_CHECK:-1}
unset PYTHONPATH # It may lead to another JAX.

die() {
  echo "setup.sh: $*" >&2
  exit 2
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --jax | --venv | --python)
      [[ -n ${2:-} ]] || die "$1 needs a value"
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    --no-example) example= && shift ;;
    -h | --help) sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit ;;
    *) die "unknown argument $1; see --help" ;;
  esac
done
[[ $venv == /* ]] || venv=$PWD/$venv
mark=$venv/.made_by_setup # What is installed, once that is complete.
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Runs an untried program, whose time and output are limited.
limited() {
  local limit=()
  ! command -v timeout >/dev/null || limit=(timeout -k 1 60)
  ${limit[@]+"${limit[@]}"} "$@" 2>/dev/null </dev/null | head -c 4096
}

# Runs a command; if it fails, dies with what was being done and its error.
must() {
  local what=$1
  shift
  "$@" >"$log" 2>&1 </dev/null ||
    die "$what: $(grep -m1 -i '^error' "$log" || tail -1 "$log")"
}

candidates() {
  if [[ -n $python ]]; then
    echo "$python"
    return
  fi
  echo python3
  printf 'python3.%s\n' 16 15 14 13 12 11 10 9
  local prefix # Of a python3 that pyenv installed, wherever that is.
  prefix=$(limited python3 -c 'import sys; print(sys.base_prefix)') || true
  [[ $prefix != */versions/* ]] || printf '%s\n' "${prefix%/*}"/*/bin/python
  printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python \
    "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/*/bin/python
}

# Sets py, version and jaxlib. An interpreter is trusted once it has run.
find_python() {
  local candidate picked newest why='' v l
  py='' version=''
  while read -r candidate; do
    candidate=$(command -v "$candidate") || continue
    if [[ $(limited "$candidate" -c 'import sys
print(sys.version_info >= (3, 9))') != True ]]; then
      [[ -n $why ]] || why="$candidate does not run, or is older than 3.9"
      continue
    fi
    if ! picked=$("$candidate" "$root/ci/jax_patch.py" pick \
      ${jax:+--release "$jax"} 2>&1 </dev/null); then
      picked=${picked##*jax_patch.py: }
      [[ $picked != 'no patches for'* ]] || die "$picked"
      [[ -n $why ]] || why="$candidate does not suit: $picked"
      continue
    fi
    if ! "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      why="$candidate has no venv module (Debian, Ubuntu: python3-venv)"
      continue
    fi
    read -r v l newest <<<"$picked"
    if [[ $v != "$version" &&
      $(printf '%s\n' "$v" "$version" | sort -V | tail -1) == "$v" ]]; then
      py=$candidate version=$v jaxlib=$l
    fi
    [[ $v != "$newest" ]] || break
  done < <(candidates)
  if [[ -z $py && -n $python ]]; then
    die "${why:-no such Python: $python}"
  elif [[ -z $py ]]; then
    die "no suitable Python found as python3, python3.x, or pyenv's or uv's;" \
      "install one or name it with --python (${why:-none runs})"
  elif [[ $version != "$newest" ]]; then
    echo "No Python here suits JAX $newest; taking JAX $version."
  fi
}

patch_jax() {
  "$venv/bin/python" "$root/ci/jax_patch.py" "$@" "$venv/bin/python"
}

pip_install() {
  must "cannot install JAX $version (no network?)" \
    "$venv/bin/python" -m pip install "$@"
}

find_python
patches=$(cksum <"$root/ci/releases.json")
key="$version $jaxlib $(cksum <"$root/ci/requirements-test.txt") $("$py" -c '
import sys; print(sys.version.split()[0], sys.base_prefix)')"

if [[ -e $venv && ! -f $mark && -n $(ls -A "$venv") ]]; then
  die "$venv exists and this script did not make it; remove it or give --venv"
fi
if [[ -f $mark && $(head -1 "$mark") == "$key" ]]; then
  # With other patches than these, files may be patched that now are not.
  state=$(tail -1 "$mark")
  [[ $state != "$patches" ]] || state=$(patch_jax status 2>&1) || true
  if [[ $state != applied:* && $state != stock:* &&
    $state != interrupted:* ]]; then
    echo "Reinstalling JAX $version in $venv."
    pip_install --force-reinstall --no-deps "jax==$version"
  fi
else
  echo "Installing JAX $version in $venv with $py."
  # Of a virtual environment, perhaps this one, take the interpreter below.
  py=$("$py" -c 'import sys; print(sys._base_executable)')
  must "cannot make $venv" mkdir -p "$venv"
  must "cannot write $mark" cp /dev/null "$mark"
  find "$venv" -mindepth 1 -maxdepth 1 ! -path "$mark" -exec rm -rf {} +
  must "cannot make $venv" "$py" -m venv "$venv"
  pip_install "jax==$version" "jaxlib==$jaxlib" \
    -r "$root/ci/requirements-test.txt"
fi
must 'cannot patch JAX' patch_jax apply
[[ $(cat "$mark") == "$key"$'\n'"$patches" ]] ||
  printf '%s\n' "$key" "$patches" >"$mark"
cat "$log"

if [[ -n $example ]]; then
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  export JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:-8}
  "$venv/bin/python" "$example"
fi
