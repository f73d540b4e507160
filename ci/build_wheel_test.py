# SPDX-License-Identifier: Apache-2.0
"""Tests of build_wheel.sh, in a clean environment."""

import os
from pathlib import Path
import re
import subprocess
import sys
import zipfile

from packaging import specifiers
import pytest

_CI = Path(__file__).resolve().parent
_EXAMPLE = _CI.parent / 'examples' / 'close_over_explicit_mesh.py'


def _run(*args, **env):
  run = subprocess.run(args, capture_output=True, text=True, check=False,
                       env={**os.environ, **env})
  assert run.returncode == 0, run.stderr
  return run.stdout


def test_wheel(tmp_path):
  script = _CI / 'jax_patch.py'
  pick = subprocess.run([sys.executable, script, 'pick'], text=True,
                        capture_output=True, check=False)
  if pick.returncode:
    pytest.skip(pick.stderr)
  version, jaxlib, _ = pick.stdout.split()
  wheels = []
  for dist in tmp_path / 'dist1', tmp_path / 'dist2':
    _run(_CI / 'build_wheel.sh', version, DIST=str(dist), PYTHON=sys.executable)
    wheel, = dist.iterdir()
    wheels.append(wheel)
  assert wheels[0].read_bytes() == wheels[1].read_bytes()
  assert wheel.name.startswith(f'jax-{version}+explicit.')
  with zipfile.ZipFile(wheel) as z:
    name, = (n for n in z.namelist() if n.endswith('.dist-info/METADATA'))
    metadata = z.read(name).decode()
  jaxlibs = re.findall(r'^Requires-Dist: jaxlib(.*?)(?:;|$)', metadata, re.M)
  assert f'=={jaxlib}' in jaxlibs
  for spec in jaxlibs:
    assert specifiers.SpecifierSet(spec).contains(jaxlib), spec

  _run(sys.executable, '-m', 'venv', tmp_path / 'venv')
  python = tmp_path / 'venv' / 'bin' / 'python'
  _run(python, '-m', 'pip', 'install', '-q', wheel)
  assert _run(script, 'status', python).startswith(f'applied: JAX {version}, ')
  assert _run(python, '-c', 'import jax, jaxlib; '
              'print(jax.__version__, jaxlib.__version__)').split() == [
                  version, jaxlib]
  if _EXAMPLE.exists():
    print(_run(python, _EXAMPLE, JAX_PLATFORMS='cpu', JAX_NUM_CPU_DEVICES='8'))


@pytest.mark.parametrize('text,args,env', [
    ('VERSION is empty', [''], {}),
    ('unknown argument --x', ['--x'], {}),
    ('unknown argument 2', ['1', '2'], {}),
    ('no patches for JAX 0.1', ['0.1'], {}),
    ('/none is no Python', [], dict(PYTHON='/none')),
    ('/bin/false is no Python', [], dict(PYTHON='/bin/false')),
    ('cannot make /dev/null/dist', [], dict(DIST='/dev/null/dist'))])
def test_refusals(tmp_path, text, args, env):
  run = subprocess.run(
      [_CI / 'build_wheel.sh', *args], capture_output=True, text=True,
      check=False, env={**os.environ, 'PYTHON': sys.executable,
                        'DIST': str(tmp_path), **env})
  assert run.returncode == 2
  assert text in run.stderr and run.stderr.count('\n') == 1
