#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks the patches (see ci/lint_patches.py) and what else is in this
# repository, with tools installed into the environment of ci/setup.sh.
#
# usage: ci/lint.sh
set -euo pipefail

if [[ $# -gt 0 ]]; then
  [[ $1 != -h && $1 != --help ]] || {
    sed -n '4,/^set/s/^# \{0,1\}//p' "$0" && exit
  }
  echo "lint.sh: unknown argument $1; see --help" >&2
  exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${JAX_PATCH_VENV:-$PWD/.venv}
buildifier=$PWD/.cache/npm/node_modules/.bin/buildifier

ci/setup.sh --no-example
"$venv/bin/python" -m pip install -qq --only-binary :all: \
  -r ci/requirements-lint.txt

status=0
"$venv/bin/ruff" check . || status=1
"$venv/bin/shellcheck" ci/*.sh .ci/run || status=1

if command -v buildifier >/dev/null; then
  buildifier=buildifier
elif [[ ! -x $buildifier ]] && command -v npm >/dev/null; then
  npm install --silent --no-audit --no-fund --prefix .cache/npm \
    @bazel/buildifier@8.2.1 || true
fi
if command -v "$buildifier" >/dev/null; then
  "$buildifier" --mode=diff --lint=warn BUILD || status=1
else
  echo 'skipped: BUILD, as there is neither buildifier nor npm to install it'
fi

"$venv/bin/python" ci/lint_patches.py || status=1
[[ $status == 0 ]] && echo 'lint: ok'
exit $status
