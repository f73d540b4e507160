# SPDX-License-Identifier: Apache-2.0
"""Tests of setup.sh: what it refuses, and that it leaves nothing half made."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

_SETUP = Path(__file__).resolve().parent / 'setup.sh'
_TOOLS = ('bash cat cksum cp dirname find grep head ls mkdir mktemp rm sed '
          'sort tail').split()


@pytest.fixture(name='path')
def _path(tmp_path):
  """A PATH with all that setup.sh needs but a Python."""
  bin_dir = tmp_path / 'bin'
  bin_dir.mkdir()
  for tool in _TOOLS:
    (bin_dir / tool).symlink_to(shutil.which(tool))
  return bin_dir


def _python(path, name, code, prefix='/usr'):
  """Puts a Python on PATH that runs `code` first."""
  (path / name).write_text(
      f'#!/bin/bash\nexport PYTHONPATH={path}/{name}_site\n'
      f'exec {sys.executable} "$@"\n')
  (path / name).chmod(0o755)
  (path / f'{name}_site').mkdir()
  (path / f'{name}_site' / 'sitecustomize.py').write_text(
      f'import sys\nsys.base_prefix = {str(prefix)!r}\n' + code)


def _setup(*args, path=None, timeout=None, **env):
  env = {k: v for k, v in {**os.environ, **env}.items()
         if not k.startswith(('JAX_PATCH', 'PYENV', 'UV_'))}
  if path:
    env.update(PATH=str(path), HOME=str(path))
  return subprocess.run([_SETUP, *args], env=env, capture_output=True,
                        text=True, check=False, timeout=timeout)


def _refused(text, *args, **kwargs):
  run = _setup(*args, **kwargs)
  assert run.returncode == 2
  assert run.stderr.startswith('setup.sh: ') and run.stderr.count('\n') == 1
  assert text in run.stderr


def test_bad_arguments(tmp_path):
  _refused('unknown argument --bogus', '--bogus')
  _refused('--jax needs a value', '--jax')
  _refused('no patches for JAX 0.1; the nearest', '--jax', '0.1',
           '--venv', tmp_path / 'venv', '--python', sys.executable)
  _refused('no such Python: /none', '--python', '/none')
  _refused('does not run', '--python', '/bin/false')
  _refused('does not run', '--python', '/bin/echo')
  assert not (tmp_path / 'venv').exists()


def test_no_python(path):
  _refused('no suitable Python found', path=path)
  _python(path, 'python3', 'sys.version_info = (3, 9, 0)\n')
  _refused('this is 3.9', path=path)


def test_python_that_does_not_run_is_passed_over(path, tmp_path):
  _python(path, 'python3', 'sys.version_info = (3, 9, 0)\n')
  _python(path, 'python3.14', 'sys.exit("not this one")\n')
  _python(path, 'python3.13', 'sys.version_info = (3, 13, 0)\n'
          'sys.modules["ensurepip"] = None\n')
  _refused('python3.13 has no venv module', path=path)
  _python(path, 'python3.12', 'sys.version_info = (3, 12, 0)\n')
  taken = tmp_path / 'taken'
  (taken / 'mine').mkdir(parents=True)
  _refused('did not make it', '--venv', taken, path=path)  # The next step.


def test_python_that_does_not_end(path, tmp_path):
  (path / 'timeout').write_text(
      '#!/bin/bash\n[[ "$1 $2 $3" == "-k 1 60" ]] || exit 1\n'
      f'exec {shutil.which("timeout")} -k 1 1 "${{@:4}}"\n')
  (path / 'timeout').chmod(0o755)
  for name, text in (('hangs', 'sleep 1000 & wait'), ('chats', 'yes')):
    (path / name).write_text(f'#!/bin/bash\nPATH=/bin:/usr/bin\n{text}\n')
    (path / name).chmod(0o755)
    _refused('does not run', '--python', path / name, path=path, timeout=60)
  for name, alias in (('hangs', 'python3'), ('chats', 'python3.14')):
    (path / alias).symlink_to(path / name)
  _python(path, 'python3.12', 'sys.version_info = (3, 12, 0)\n')
  taken = tmp_path / 'taken'
  (taken / 'mine').mkdir(parents=True)
  _refused('did not make it', '--venv', taken, path=path, timeout=60)


def test_pyenv_wherever_it_is(path, tmp_path):
  versions = tmp_path / 'pyenv' / 'versions'
  for version in '3.9', '3.12':
    (versions / version / 'bin').mkdir(parents=True)
  _python(path, 'python3', 'sys.version_info = (3, 9, 0)\n',
          prefix=versions / '3.9')
  _refused('this is 3.9', path=path)
  _python(versions / '3.12' / 'bin', 'python',
          'sys.version_info = (3, 12, 0)\n')
  taken = tmp_path / 'taken'
  (taken / 'mine').mkdir(parents=True)
  _refused('did not make it', '--venv', taken, path=path)  # The next step.


def test_directory_in_the_way(tmp_path):
  (tmp_path / 'file').touch()
  for venv in tmp_path, tmp_path / 'file':
    _refused('this script did not make it', '--venv', venv)
  assert os.listdir(tmp_path) == ['file']


def test_no_network_leaves_nothing_to_take_for_good(tmp_path):
  venv = tmp_path / 'venv'
  for _ in range(2):
    _refused('cannot install JAX', '--venv', venv, PIP_NO_INDEX='1',
             PIP_FIND_LINKS='')
    assert (venv / '.made_by_setup').read_text() == ''
    assert not (venv / 'stale').exists()
    (venv / 'stale').touch()
