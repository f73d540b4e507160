# SPDX-License-Identifier: Apache-2.0
"""Tests of jax_patch.py, on a tiny JAX with faults injected."""

import errno
import fcntl
import glob
import hashlib
import importlib.util
import io
import json
import os
from pathlib import Path
import py_compile
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import types

import pytest

# pytest-xdist has threads; the forked processes here do not use them.
pytestmark = pytest.mark.filterwarnings('ignore:.*fork:DeprecationWarning')

_CI = Path(__file__).resolve().parent
_SCRIPT = _CI / 'jax_patch.py'
_FILES = {
    'jax/__init__.py': '',
    'jax/version.py': '_version = "1.2.3"\n_release_version: str = "1.2.3"\n',
    'jax/_src/__init__.py': '',
    'jax/_src/a.py': ''.join(f'# line {i}\n' for i in range(30)) + 'X = 1\n',
    'jax/_src/b.py': 'def f():\n  return 1\n',
    'jax/_src/sub/c.py': 'Z = 1  # no newline at end',
}
_EDITS = {  # Of the same size, so that only the mtime tells bytecode.
    'jax/_src/a.py': ('X = 1', 'X = 2'),
    'jax/_src/b.py': ('return 1', 'return 2'),
    'jax/_src/sub/c.py': ('Z = 1', 'Z = 2'),
}


def _write(root, files):
  for path, text in files.items():
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def _edit(tree, edits=None):
  for path, (old, new) in (edits or _EDITS).items():
    f = tree / path
    f.write_text(f.read_text().replace(old, new))


def _read(tree):
  return {f.relative_to(tree).as_posix(): f.read_bytes()
          for f in sorted(tree.rglob('*'))
          if f.is_file() and '__pycache__' not in f.parts}


def _add_release(repo, version, patches):
  """Makes an sdist of the tiny JAX and its entry in releases.json."""
  sdist = repo / '.cache' / f'jax-{version}.tar.gz'
  sdist.parent.mkdir(exist_ok=True)
  with tarfile.open(sdist, 'w:gz') as tar:
    for path, text in {**_FILES, 'PKG-INFO': ''}.items():
      data = text.replace('1.2.3', version).encode()
      info = tarfile.TarInfo(f'jax-{version}/{path}')
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  releases = repo / 'ci' / 'releases.json'
  data = json.loads(releases.read_text())
  data['releases'].append(dict(
      version=version, sdist=sdist.name, jaxlib=version, python='>=3.9',
      sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(), patches=patches,
      tested='never', files={}))
  releases.write_text(json.dumps(data))


@pytest.fixture(name='world')
def _world(monkeypatch):
  """A patch set, a stock tree that it fits, and jax_patch.py as a module."""
  # Not in tmp_path, which only its owner can enter.
  base = Path(tempfile.mkdtemp(prefix='jax_patch_test')).resolve()
  base.chmod(0o755)
  repo, stock = base / 'repo', base / 'stock'
  (repo / 'ci').mkdir(parents=True)
  (repo / 'ci' / 'releases.json').write_text('{"revision": 1, "releases": []}')
  _write(stock, _FILES)
  _add_release(repo, '1.2.3', '.')
  monkeypatch.setenv('JAX_PATCH_ROOT', str(repo))
  monkeypatch.delenv('JAX_PATCH_CACHE', raising=False)
  spec = importlib.util.spec_from_file_location('jax_patch', _SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  patched = base / 'patched'
  shutil.copytree(stock, patched)
  _edit(patched)
  assert module.main(['refresh', str(patched)]) == 0
  yield types.SimpleNamespace(
      base=base, repo=repo, tree=stock, stock=_read(stock),
      patched=_read(patched), module=module,
      run=lambda *args: module.main([str(a) for a in args]))
  shutil.rmtree(base)


def _state(world, tree=None):
  data = world.module._Data()
  return world.module._Tree(data, tree or world.tree).status()[0]


def _child(f):
  """Runs f in a forked process; returns its exit status, or -signal."""
  pid = os.fork()
  if not pid:
    code = 99
    try:
      code = f() or 0
    finally:
      os._exit(code)
  status = os.waitpid(pid, 0)[1]
  return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -status


def _at_call(n, action):
  """Calls `action` instead of the n-th call that changes a file system."""
  count = 0
  def wrap(f):
    def wrapped(*args, **kwargs):
      nonlocal count
      count += 1
      if count == n:
        action()
      return f(*args, **kwargs)
    return wrapped
  for name in ('open', 'fsync', 'fchmod', 'utime', 'replace', 'unlink'):
    setattr(os, name, wrap(getattr(os, name)))


def _refused(world, capsys, text, *args):
  """Checks that a run says `text` in one line, exits 2, changes nothing."""
  before = _read(world.base)
  capsys.readouterr()
  assert world.run(*args) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1 and error.endswith('\n'), error
  assert text in error
  assert _read(world.base) == before


def test_round_trip(world, capsys):
  (world.tree / 'jax/_src/a.py').chmod(0o664)
  for command, state, content in (
      ('check', 'stock', world.stock), ('apply', 'applied', world.patched),
      ('check', 'applied', world.patched), ('apply', 'applied', world.patched),
      ('revert', 'stock', world.stock), ('revert', 'stock', world.stock)):
    assert world.run(command, world.tree) == 0
    assert _read(world.tree) == content
    assert _state(world) == state
  assert 'already applied' in capsys.readouterr().out
  assert (world.tree / 'jax/_src/a.py').stat().st_mode & 0o777 == 0o664


def test_status(world, capsys):
  world.run('apply', world.tree)
  capsys.readouterr()
  assert world.run('status', world.tree) == 0
  assert capsys.readouterr().out == (
      f'applied: JAX 1.2.3, revision 1, at {world.tree}\n')
  assert world.run('status', '--json', world.tree) == 0
  status = json.loads(capsys.readouterr().out)
  assert (status['state'], status['revision']) == ('applied', 1)
  assert status['files'] == dict.fromkeys(_EDITS, 'patched')
  version = world.tree / 'jax/version.py'
  version.write_text(version.read_text().replace('1.2.3', '2.0'))
  assert world.run('status', world.tree) == 0
  assert capsys.readouterr().out.startswith('unsupported: JAX 2.0 ')


@pytest.mark.parametrize('command', ['list', 'pick', 'check', 'apply',
                                     'revert', 'status', 'open', 'refresh'])
def test_help(world, capsys, command):
  with pytest.raises(SystemExit) as e:
    world.run(command, '--help')
  assert e.value.code == 0
  assert len(capsys.readouterr().out) > 100


def test_list_and_pick(world, capsys):
  assert world.run('list') == 0
  assert 'JAX 1.2.3, jaxlib 1.2.3, Python >=3.9' in capsys.readouterr().out
  assert world.run('pick') == 0
  assert capsys.readouterr().out == '1.2.3 1.2.3 1.2.3\n'
  fits = world.module._fits_python
  assert fits('>=3.11,<3.15', (3, 11)) and fits('>=3.11,<3.15', (3, 14))
  assert not fits('>=3.11,<3.15', (3, 10))
  assert not fits('>=3.11,<3.15', (3, 15))


@pytest.mark.parametrize('first,then', [
    ('apply', 'apply'), ('apply', 'revert'),
    ('revert', 'apply'), ('revert', 'revert')])
def test_killed_at_every_step(world, first, then):
  start = world.stock if first == 'apply' else world.patched
  goal = world.patched if then == 'apply' else world.stock
  states = set()
  for n in range(1, 1000):
    _write(world.tree, {k: v.decode() for k, v in start.items()})
    def run(n=n):
      _at_call(n, lambda: os.kill(os.getpid(), signal.SIGKILL))
      return world.run(first, world.tree)
    code = _child(run)
    if code == 0:
      break
    assert code == -signal.SIGKILL
    states.add(_state(world))
    assert _state(world) != 'changed'
    assert world.run(then, world.tree) == 0
    assert _read(world.tree) == goal
  assert n > 3 * len(_EDITS)
  assert {'stock', 'interrupted', 'applied'} <= states


@pytest.mark.parametrize('command', ['apply', 'revert'])
@pytest.mark.parametrize('error', [errno.ENOSPC, errno.EACCES, errno.EINTR])
def test_failed_at_every_step(world, capfd, command, error):
  if command == 'revert':
    world.run('apply', world.tree)
  before = _read(world.tree)
  goal = world.patched if command == 'apply' else world.stock
  for n in range(1, 1000):
    def run(n=n):
      fired = []
      def fail():
        fired.append(n)
        raise OSError(error, os.strerror(error))
      _at_call(n, fail)
      code = world.run(command, world.tree)
      return code if code or not fired else 50
    capfd.readouterr()
    code = _child(run)
    if code == 0:
      break
    errors = capfd.readouterr().err
    if code == 50:  # Went on after an error that does not matter.
      assert _read(world.tree) == goal
      _write(world.tree, {k: v.decode() for k, v in before.items()})
    else:
      assert code == 2
      assert errors.count('\n') == 1
      assert _read(world.tree) == before
  assert n > 3 * len(_EDITS)


def test_interrupt_changes_nothing(world):
  def interrupt():
    raise KeyboardInterrupt
  def run():
    count = 0
    replace = os.replace
    def second(*args):
      nonlocal count
      count += 1
      if count == 2:
        interrupt()
      replace(*args)
    os.replace = second
    return world.run('apply', world.tree)
  assert _child(run) == 2
  assert _read(world.tree) == world.stock


def test_leftovers_of_a_killed_run(world):
  for _ in range(2):  # Of a stock, then of a patched tree.
    leftover = world.tree / 'jax/_src/.a.py.jax_patch'
    leftover.write_text('half a fi')
    assert _state(world) == 'interrupted'
    assert world.run('apply', world.tree) == 0
    assert _read(world.tree) == world.patched


def test_two_at_once(world):
  for _ in range(5):
    pids = []
    for command in 'apply', 'revert', 'apply', 'revert':
      pid = os.fork()
      if not pid:
        os._exit(world.run(command, world.tree))
      pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert _read(world.tree) in (world.stock, world.patched)


def test_waits_for_another_run(world):
  fd = os.open(world.tree / 'jax', os.O_RDONLY)
  fcntl.flock(fd, fcntl.LOCK_EX)
  pid = os.fork()
  if not pid:
    os.close(fd)
    os._exit(world.run('apply', world.tree))
  time.sleep(.5)
  assert _read(world.tree) == world.stock
  os.close(fd)
  assert os.waitpid(pid, 0)[1] == 0
  assert _read(world.tree) == world.patched


def _x(tree):
  """X of jax/_src/a.py, as a new Python sees it."""
  return int(subprocess.run(
      [sys.executable, '-c', 'import jax._src.a as a; print(a.X)'],
      cwd=tree, capture_output=True, check=True).stdout)


@pytest.mark.parametrize('mode', py_compile.PycInvalidationMode)
def test_stale_bytecode(world, mode):
  a = world.tree / 'jax/_src/a.py'
  future = int(time.time()) + 50  # Bytecode may be newer than any clock.
  os.utime(a, (future, future))
  py_compile.compile(str(a), invalidation_mode=mode)
  assert _x(world.tree) == 1
  assert world.run('apply', world.tree) == 0
  assert _x(world.tree) == 2
  py_compile.compile(str(a), invalidation_mode=mode)
  assert world.run('revert', world.tree) == 0
  assert _x(world.tree) == 1


def test_bytecode_written_during_a_run(world):
  a = world.tree / 'jax/_src/a.py'
  pyc = Path(importlib.util.cache_from_source(str(a)))
  mtimes = []
  for command, x in ('apply', 2), ('revert', 1), ('apply', 2):
    py_compile.compile(str(a))
    old = pyc.read_bytes()
    mtimes.append(int(a.stat().st_mtime))
    assert world.run(command, world.tree) == 0
    pyc.write_bytes(old)
    assert _x(world.tree) == x
  assert len(set(mtimes)) == len(mtimes)


def test_hard_link_is_left_alone(world):
  link = world.base / 'link.py'
  os.link(world.tree / 'jax/_src/a.py', link)
  assert world.run('apply', world.tree) == 0
  assert link.read_bytes() == world.stock['jax/_src/a.py']


def _only(program, world, monkeypatch):
  """Leaves one program on PATH."""
  if not shutil.which(program):
    pytest.skip(f'no {program} here')
  bin_dir = world.base / 'bin'
  bin_dir.mkdir()
  (bin_dir / program).symlink_to(shutil.which(program))
  monkeypatch.setenv('PATH', str(bin_dir))


@pytest.mark.parametrize('program', ['git', 'patch'])
def test_only_one_patch_program(world, monkeypatch, program):
  _only(program, world, monkeypatch)
  assert world.run('apply', world.tree) == 0
  assert _read(world.tree) == world.patched
  assert world.run('revert', world.tree) == 0
  assert _read(world.tree) == world.stock


def test_broken_git_falls_back_to_patch(world, monkeypatch):
  if not shutil.which('patch'):
    pytest.skip('no patch here')
  bin_dir = world.base / 'bin'
  bin_dir.mkdir()
  (bin_dir / 'git').write_text('#!/bin/sh\nexit 1\n')
  (bin_dir / 'git').chmod(0o755)
  monkeypatch.setenv('PATH', f'{bin_dir}:{os.environ["PATH"]}')
  assert world.run('apply', world.tree) == 0
  assert _read(world.tree) == world.patched


def test_inside_an_unrelated_git_repository(world, monkeypatch):
  subprocess.run(['git', 'init', '-q', world.base], check=True)
  monkeypatch.setenv('TMPDIR', str(world.base))
  monkeypatch.setattr(tempfile, 'tempdir', None)
  monkeypatch.chdir(world.tree / 'jax')
  _only('git', world, monkeypatch)
  assert world.run('apply', world.tree) == 0
  assert _read(world.tree) == world.patched


def test_no_patch_program(world, capsys, monkeypatch):
  monkeypatch.setenv('PATH', str(world.base))
  _refused(world, capsys, 'no patch program', 'apply', world.tree)


def test_site_packages_and_interpreter(world, capsys):
  venv = world.base / 'venv'
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv],
                 check=True)
  python = venv / 'bin' / 'python'
  _refused(world, capsys, 'no JAX', 'apply', python)
  site, = venv.glob('lib/python*/site-packages')
  _write(site, _FILES)
  assert world.run('apply', python) == 0
  assert _state(world, site) == 'applied'
  assert world.run('revert', site) == 0
  assert _state(world, site) == 'stock'
  info = site / 'jax-1.2.3.dist-info'
  _write(info, {'METADATA': 'Name: jax\nVersion: 1.2.3\n',
                'direct_url.json': json.dumps(dict(
                    url='file:///my%20src/jax', dir_info=dict(editable=True)))})
  _refused(world, capsys, 'editable install', 'apply', python)
  shutil.rmtree(site / 'jax')
  _refused(world, capsys, 'point at the checkout, /my src/jax', 'apply', site)
  for text in '[]', '{not json', '{"dir_info": {"editable": true}}':
    (info / 'direct_url.json').write_text(text)
    _refused(world, capsys, 'direct_url.json', 'apply', site)


@pytest.mark.parametrize('link', ['jax', 'jax/_src', 'jax/_src/a.py', 'all'])
def test_symbolic_links(world, capsys, link):
  """As of uv's symlink mode: their targets are shared by environments."""
  venv = world.base / 'venv'
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv],
                 check=True)
  site, = venv.glob('lib/python*/site-packages')
  shutil.copytree(world.tree / 'jax', site / 'jax')
  for path in _FILES if link == 'all' else [link]:
    f = site / path
    if f.is_dir():
      shutil.rmtree(f)
    else:
      f.unlink()
    f.symlink_to(world.tree / path)
  for target in site, venv / 'bin' / 'python':
    for command in 'check', 'apply', 'revert':
      _refused(world, capsys, '--link-mode', command, target)
    assert world.run('status', target) == 0
    assert capsys.readouterr().out == f'stock: JAX 1.2.3 at {site}\n'


def test_zipped_jax(world, capsys):
  venv = world.base / 'venv'
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', venv],
                 check=True)
  site, = venv.glob('lib/python*/site-packages')
  archive = shutil.make_archive(world.base / 'jax', 'zip', world.tree)
  (site / 'jax.pth').write_text(archive)
  _refused(world, capsys, f'in a zip file, {archive}', 'apply',
           venv / 'bin' / 'python')


def _program(world, text):
  f = world.base / 'program'
  f.write_text(f'#!/bin/sh\n{text}\n')
  f.chmod(0o755)
  return f


@pytest.mark.parametrize('text', ['sleep 1000', 'sleep 1000 & wait',
                                  'while :; do :; done', 'yes', 'yes >&2'])
def test_program_that_does_not_end(world, capsys, monkeypatch, text):
  monkeypatch.setattr(world.module, '_PROBE_SECONDS', 1)
  start = time.monotonic()
  _refused(world, capsys, 'does not run as Python', 'apply',
           _program(world, text))
  assert time.monotonic() - start < 30


@pytest.mark.parametrize('said', [
    r'\377', '[1,2]', '[3,null]', '["/none/b/c","{not json"]',
    '["/none/b/c","[]"]', '["/none/b/c",null]', '["/none/b/c",[]]', '{}', 'x',
    '["b","null"]', '[[],[]]', 'null'])
def test_program_that_says_something_else(world, capsys, said):
  program = _program(world, f"printf '{said}'")
  for command in 'apply', 'status':
    _refused(world, capsys, '', command, program)


@pytest.mark.parametrize('make', [
    os.mkfifo, lambda f: os.symlink('/dev/zero', f), os.mkdir])
def test_special_files(world, capsys, make):
  a = world.tree / 'jax/_src/a.py'
  a.unlink()
  make(a)
  for command in 'check', 'apply', 'revert', 'status':
    _refused(world, capsys, f'not a regular file: {a}', command, world.tree)
  os.mkfifo(world.base / 'fifo')
  _refused(world, capsys, 'neither', 'apply', world.base / 'fifo')
  _refused(world, capsys, 'neither', 'apply', '/dev/zero')


def test_bad_targets(world, capsys):
  def refused(text, target):
    for command in 'check', 'apply', 'revert', 'status':
      _refused(world, capsys, text, command, target)
  refused('no such file or directory', world.base / 'none')
  refused('is not JAX', world.repo)
  text = world.base / 'text'
  text.write_text('#!/bin/sh\necho hello\n')
  refused('does not run as Python', text)
  text.chmod(0o755)
  refused('is not a Python interpreter', text)
  refused('is empty', '')
  (world.tree / 'jax/version.py').write_text('')
  refused('has no _version', world.tree)
  (world.tree / 'jax/version.py').write_bytes(b'_version = "1.2.3"  # \xe9')
  refused('not UTF-8', world.tree)


def _bad_data():
  good = dict(version='1.2.3', sdist='', sha256='', jaxlib='', python='>=3.9',
              patches='.', tested='', files={})
  for bad in ({}, [], 1, dict(revision=1), dict(revision=1, releases=[]),
              dict(revision=1, releases={}), dict(revision=1, releases=[1]),
              dict(revision='1', releases=[good])):
    yield bad
  for name in good:
    for value in None, 1:
      yield dict(revision=1, releases=[good, {**good, name: value}])
  for files in ({'a': 1}, {'a': {}}, {'a': {'stock': '', 'x': ''}}):
    yield dict(revision=1, releases=[{**good, 'files': files}])


def test_bad_releases_json(world, capsys):
  f = world.repo / 'ci' / 'releases.json'
  for text in b'{', b'\xe9', *(json.dumps(d).encode() for d in _bad_data()):
    f.write_bytes(text)
    for args in (['list'], ['pick'], ['status', world.tree],
                 ['open', world.base / 'new']):
      _refused(world, capsys, 'releases.json', *args)


def test_relative_root(world, monkeypatch):
  env = {**os.environ, 'JAX_PATCH_ROOT': 'repo'}
  subprocess.run([sys.executable, _SCRIPT, 'apply', 'stock'], env=env,
                 cwd=world.base, check=True)
  assert _read(world.tree) == world.patched


def test_release_without_patches(world, capsys):
  _add_release(world.repo, '1.4', 'backports/1.4')
  for version, nearest in (('1.2', '1.2.3'), ('1.3', '1.2.3'), ('9', '1.4')):
    _write(world.tree, {'jax/version.py': f"_version = '{version}'\n"})
    _refused(world, capsys, f'no patches for JAX {version}; the nearest '
             f'release that has them is {nearest}', 'apply', world.tree)
  _refused(world, capsys, 'run refresh', 'pick', '--release', '1.4')


@pytest.mark.parametrize('command', ['check', 'apply', 'revert'])
def test_changed_by_hand(world, capsys, command):
  for start in 'revert', 'apply':
    world.run(start, world.tree)
    _edit(world.tree, {'jax/_src/b.py': ('def f', 'def g')})
    _refused(world, capsys, 'jax/_src/b.py', command, world.tree)
    assert _state(world) == 'changed'
    _edit(world.tree, {'jax/_src/b.py': ('def g', 'def f')})
  (world.tree / 'jax/_src/a.py').unlink()
  _refused(world, capsys, 'jax/_src/a.py', command, world.tree)


@pytest.mark.parametrize('path', ['jax/_src/b.py', 'jax/_src/sub'])
def test_no_permission(world, capfd, path):
  subprocess.run(['chmod', '-R', 'a+rwX', world.tree], check=True)
  (world.tree / path).chmod(0o555)
  def run(command):
    if not os.getuid():
      os.setuid(65534)
    return world.run(command, world.tree)
  for command in 'check', 'apply':
    capfd.readouterr()
    assert _child(lambda command=command: run(command)) == 2
    error = capfd.readouterr().err
    assert error.count('\n') == 1
    assert f'no permission to write {world.tree / path}' in error
    assert _read(world.tree) == world.stock
  (world.tree / path).chmod(0o777)
  assert _child(lambda: run('apply')) == 0


@pytest.fixture(name='small')
def _small(world):
  """A file system of the tree with about one page left."""
  mount = world.base / 'small'
  mount.mkdir()
  run = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'tmpfs',
                        mount], capture_output=True, check=False)
  if run.returncode:
    pytest.skip('cannot mount a tmpfs here')
  shutil.copytree(world.tree, mount / 'tree')
  yield mount
  subprocess.run(['umount', mount], check=True)


def test_full_disk(world, capsys, small):
  with pytest.raises(OSError), open(small / 'filler', 'wb', 0) as f:
    while True:
      f.write(b'x' * 512)
  with open(small / 'filler', 'r+b') as f:
    f.truncate(f.seek(0, 2) - 4096)
  _refused(world, capsys, f'the disk is full: {small}/tree/jax/_src/', 'apply',
           small / 'tree')
  _refused(world, capsys, f'the disk is full: {small}\n', 'open', small / 'new')
  (small / 'filler').unlink()
  assert world.run('apply', small / 'tree') == 0


def test_read_only_file_system(world, capsys, small):
  subprocess.run(['mount', '-o', 'remount,ro', small], check=True)
  for command in 'check', 'apply':
    _refused(world, capsys, 'read-only file system', command, small / 'tree')


def test_patch_that_does_not_fit(world, capsys):
  patch = world.repo / 'jax/_src/b.py.patch'
  text = patch.read_text()
  patch.write_text(text.replace('+  return 2', '+  return 3'))
  _refused(world, capsys, 'does not give the sha256', 'apply', world.tree)
  patch.write_text(text.replace('-  return 1', '-  return 7'))
  _refused(world, capsys, 'does not apply', 'apply', world.tree)
  patch.unlink()
  _refused(world, capsys, 'no such patch', 'apply', world.tree)


def test_open(world, capsys):
  tree = world.base / 'opened'
  assert world.run('open', tree) == 0
  assert _state(world, tree) == 'applied'
  _refused(world, capsys, 'exists', 'open', tree)
  _refused(world, capsys, f'no such directory: {world.base}/none\n', 'open',
           world.base / 'none' / 'tree')
  stock = world.base / 'opened-stock'
  assert world.run('open', '--stock', '--release', '1.2.3', stock) == 0
  assert _state(world, stock) == 'stock'


def test_refresh_is_idempotent(world, capsys):
  before = _read(world.repo)
  for tree in [], [world.base / 'patched']:
    capsys.readouterr()
    assert world.run('refresh', *tree) == 0
    assert capsys.readouterr().out == ''
    assert _read(world.repo) == before


def test_refresh_keeps_headers_and_removes_patches(world, capsys):
  patch = world.repo / 'jax/_src/a.py.patch'
  patch.write_text(patch.read_text().replace('TODO', 'Mine', 1))
  tree = world.base / 'patched'
  _edit(tree, {'jax/_src/a.py': ('line 3', 'LINE 3'),
               'jax/_src/b.py': ('return 2', 'return 1')})
  _refused(world, capsys, 'add --drop jax/_src/b.py', 'refresh', tree)
  drop = ['--drop', 'jax/_src/b.py']
  for path, why in (('jax/_src/a.py', 'the tree changes it'),
                    ('jax/_src/x.py', 'it has no patch')):
    _refused(world, capsys, f'{path}: {why}', 'refresh', tree, *drop,
             '--drop', path)
  assert world.run('refresh', tree, *drop) == 0
  text = patch.read_text()
  assert text.startswith('Description: Mine\n') and '+# LINE 3' in text
  assert not (world.repo / 'jax/_src/b.py.patch').exists()
  assert world.run('apply', world.tree) == 0
  assert _read(world.tree) == _read(tree)


def test_refresh_of_a_bad_tree(world, capsys):
  tree = world.base / 'patched'
  _refused(world, capsys, 'has no change in jax/_src/a.py', 'refresh',
           world.tree)
  for name in 'a.py.rej', 'b.py.orig':
    (tree / 'jax/_src' / name).touch()
    _refused(world, capsys, f'{name} is there', 'refresh', tree)
    (tree / 'jax/_src' / name).unlink()
  (tree / 'jax/_src/new.py').touch()
  _refused(world, capsys, 'jax/_src/new.py is not in the sdist',
           'refresh', tree)
  (tree / 'jax/_src/new.py').unlink()
  (tree / 'jax/__init__.py').unlink()
  _refused(world, capsys, 'lacks jax/__init__.py', 'refresh', tree)


def test_refresh_with_a_wrong_sdist(world, capsys):
  sdist = world.base / 'jax.tar.gz'
  sdist.write_bytes(b'')
  _refused(world, capsys, 'is not the sdist', 'refresh', '--sdist', sdist)


def test_older_revision(world, capsys):
  world.run('apply', world.tree)
  releases = world.repo / 'ci' / 'releases.json'
  releases.write_text(
      releases.read_text().replace('"revision": 1', '"revision": 2'))
  _refused(world, capsys, 'run refresh', 'status', world.tree)
  tree = world.base / 'patched'
  _edit(tree, {'jax/_src/b.py': ('return 2', 'return 3')})
  assert world.run('refresh', tree) == 0
  assert _state(world) == 'older'
  _refused(world, capsys, 'has revision 1', 'apply', world.tree)
  assert _state(world, tree) == 'applied'


def test_one_patch_directory_for_two_releases(world):
  _add_release(world.repo, '1.2.4', '.')
  assert world.run('refresh', '--release', '1.2.3') == 0
  for version in '1.2.3', '1.2.4':
    tree = world.base / version
    assert world.run('open', '--release', version, tree) == 0
    assert _state(world, tree) == 'applied'
    assert world.module._version(tree) == version


def test_oldest_python(world):
  names = ['python3.9', *glob.glob(os.path.expanduser(
      '~/.pyenv/versions/3.9.*/bin/python'))]
  def runs(name):
    return shutil.which(name) and not subprocess.run(
        [name, '-c', ''], capture_output=True, check=False).returncode
  python = next(filter(runs, names), None)
  if not python:
    pytest.skip('no Python 3.9 here')
  for command in 'check', 'apply', 'status', 'revert':
    subprocess.run([python, _SCRIPT, command, world.tree], check=True)
  assert _read(world.tree) == world.stock


def test_real_patches(monkeypatch, tmp_path):
  """Every release's stock sdist takes the patches and gives them back."""
  for name in 'JAX_PATCH_ROOT', 'GIT_DIR':
    monkeypatch.delenv(name, raising=False)
  def run(*args):
    return subprocess.run([sys.executable, _SCRIPT, *args], check=True,
                          capture_output=True, text=True, cwd=tmp_path).stdout
  releases = [r for r in json.loads(run('list', '--json'))['releases']
              if r['files']]
  if not releases:
    pytest.skip('no patches yet')
  for r in releases:
    tree = tmp_path / r['version']
    run('open', '--stock', '--release', r['version'], tree)
    before = _read(tree)
    run('apply', tree)
    changed = {k for k, v in _read(tree).items() if before[k] != v}
    assert changed == set(r['files'])
    run('revert', tree)
    assert _read(tree) == before
    shutil.rmtree(tree)
