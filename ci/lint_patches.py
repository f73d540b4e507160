#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the patches of every release, or of those named.

A patch must have a complete header and be just what `jax_patch.py refresh`
makes of the sdist (hence no fuzz and no offset), must revert to the same bytes,
and may add no finding of ruff or pyrefly, run as JAX runs them, to stock JAX's.
"""

import argparse
import collections
import contextlib
import io
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile

import jax_patch

_FIELDS = (('Description:', 'Subject:'), ('Author:', 'From:', 'Origin:'),
           ('Bug:',), ('Forwarded:',))
_BIN = Path(sys.executable).parent


def _jax_patch(*args, **env):
  run = subprocess.run(
      [sys.executable, jax_patch.__file__, *args], text=True, check=False,
      capture_output=True, env={**os.environ, **env})
  return run.stdout + run.stderr if run.returncode else run.stdout


def _header_problems(patch):
  """Yields what a DEP-3 header lacks."""
  header = jax_patch._header(patch).decode()
  if 'TODO' in header:
    yield f'{patch}: the header has a TODO'
  if not header.startswith(_FIELDS[0]):
    yield f'{patch}: does not start with a Description'
  for names in _FIELDS[1:]:
    if not any(line.startswith(names) for line in header.splitlines()):
      yield f'{patch}: the header has no {names[0][:-1]}'


def _refresh_problems(release):
  """Yields what refresh would write, on a copy of the patches."""
  with tempfile.TemporaryDirectory() as d:
    copy = Path(d)
    for name in 'ci', 'jax', 'backports':
      if (jax_patch._ROOT / name).is_dir():
        shutil.copytree(jax_patch._ROOT / name, copy / name)
    cache = str(jax_patch._sdist(release).parent)
    said = _jax_patch('refresh', '--release', release['version'],
                      JAX_PATCH_ROOT=d, JAX_PATCH_CACHE=cache)
    for line in said.splitlines():
      yield f'refresh of {release["version"]}: {line}'


def _findings(tree, paths):
  """Counts the findings of ruff and pyrefly, without their line numbers."""
  def run(*args):
    done = subprocess.run([_BIN / args[0], *args[1:]], cwd=tree, check=False,
                          capture_output=True, text=True)
    try:
      return json.loads(done.stdout)
    except ValueError:
      raise jax_patch.Refusal(f'{args[0]} failed: {done.stderr}') from None
  found = collections.Counter()
  for e in run('ruff', 'check', '--no-cache', '--output-format=json', *paths):
    path = Path(e['filename']).resolve().relative_to(tree)
    found[f'{path}: ruff: {e["message"]} [{e["code"]}]'] += 1
  for e in run('pyrefly', 'check', '--output-format=json',
               '--python-interpreter-path', sys.executable)['errors']:
    if e.get('severity', 'error') == 'error':
      found[f'{e["path"]}: pyrefly: {e["description"]} [{e["name"]}]'] += 1
  return found


def _problems(release):
  """Yields all that is wrong with the patches of a release."""
  data = jax_patch._Data()
  version = release['version']
  paths = list(data.hashes(release))
  for path in paths:
    yield from _header_problems(jax_patch._patch_file(release, path))
  refresh = list(_refresh_problems(release))
  yield from refresh
  if refresh:
    return
  with tempfile.TemporaryDirectory() as d:
    tree = Path(d).resolve() / 'jax'
    with contextlib.redirect_stdout(io.StringIO()):
      jax_patch.main(['open', '--stock', '--release', version, str(tree)])
      stock = {f: f.read_bytes() for f in tree.rglob('*') if f.is_file()}
      old = _findings(tree, paths)
      jax_patch.main(['apply', str(tree)])
      new = _findings(tree, paths)
      jax_patch.main(['revert', str(tree)])
    if stock != {f: f.read_bytes() for f in tree.rglob('*') if f.is_file()}:
      yield f'JAX {version} reverted is not stock'
  yield from (new - old)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('versions', metavar='VERSION', nargs='*')
  args = parser.parse_args()
  problems = []
  try:
    data = jax_patch._Data()
    for release in [*map(data.release, args.versions)] or data.releases:
      problems += _problems(release)
  except jax_patch.Refusal as e:
    problems.append(str(e))
  print(*problems, sep='\n', end='\n' if problems else '')
  return bool(problems)


if __name__ == '__main__':
  sys.exit(main())
