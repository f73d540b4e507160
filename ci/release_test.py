# SPDX-License-Identifier: Apache-2.0
"""Tests of new_release.sh, setup.sh and upstream_branch.sh, on a tiny JAX."""

import hashlib
import io
import json
import os
from pathlib import Path
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

_CI = Path(__file__).resolve().parent
_VERSION = '_version = "{0}"\n_release_version: str = "{0}"\n'
_CODE = ''.join(f'# line {i}\n' for i in range(30)) + 'X = 1\n# end\n'
_BACKEND = '''
import os, shutil
def prepare_metadata_for_build_wheel(directory, config_settings=None):
  d = os.path.join(directory, 'jax.dist-info')
  os.mkdir(d)
  shutil.copy('PKG-INFO', os.path.join(d, 'METADATA'))
  return 'jax.dist-info'
'''
_UPSTREAM_TEST = '''\
# Copyright 2001 The JAX Authors.
#
# License.

class ShardMapTest:

  def test_before(self):
    pass

  @decorator((2,))
  def test_close_over_explicit_sharded_input_error(self, mesh):
    old = 1

    old = 2

  def test_after(self):
    pass
'''
_UPSTREAM_BUILD = '''\
jax_multiplatform_test(
    name = "shard_map_test",
    deps = [],
)

other()
'''
_BUILD = '''\
load("//jaxlib:jax.bzl", "jax_multiplatform_test")

jax_multiplatform_test(
    name = "new_test",
    srcs = ["new_test.py"],
)
'''


def _sdist(directory, version, files):
  """Makes an sdist of these files, or of a.py with this text and b.py."""
  if isinstance(files, str):
    files = {'jax/_src/a.py': files, 'jax/_src/b.py': 'Y = 1\n'}
  metadata = (f'Metadata-Version: 2.1\nName: jax\nVersion: {version}\n'
              'Requires-Python: >=3.9\n'
              f'Requires-Dist: jaxlib<={version},>=0.1\n')
  directory.mkdir(exist_ok=True)
  path = directory / f'jax-{version}.tar.gz'
  with tarfile.open(path, 'w:gz') as tar:
    for name, text in {
        'jax/version.py': _VERSION.format(version),
        **files, 'PKG-INFO': metadata, 'backend.py': _BACKEND,
        'pyproject.toml': '[build-system]\nrequires = []\n'
        'build-backend = "backend"\nbackend-path = ["."]\n'}.items():
      info = tarfile.TarInfo(f'jax-{version}/{name}')
      info.size = len(text)
      tar.addfile(info, io.BytesIO(text.encode()))
  return path


def _wheel(directory, name, files=()):
  """Makes a wheel of version 1.1."""
  info = f'{name}-1.1.dist-info'
  files = {**dict(files), f'{info}/METADATA':
           f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.1\n',
           f'{info}/WHEEL': 'Wheel-Version: 1.0\nTag: py3-none-any\n'
           'Generator: test\nRoot-Is-Purelib: true\n'}
  record = ''.join(f'{f},,\n' for f in [*files, f'{info}/RECORD'])
  with zipfile.ZipFile(directory / f'{name}-1.1-py3-none-any.whl', 'w') as z:
    for path, text in {**files, f'{info}/RECORD': record}.items():
      z.writestr(path, text)


def _run(*args, code=0, **kwargs):
  run = subprocess.run([str(a) for a in args], capture_output=True, text=True,
                       check=False, **kwargs)
  assert run.returncode == code, run.stdout + run.stderr
  return run.stderr if code else run.stdout


@pytest.fixture(name='repo')
def _repo(tmp_path, monkeypatch):
  """A patch set for JAX 1.1, whose only patch changes X."""
  repo = tmp_path / 'repo'
  shutil.copytree(_CI, repo / 'ci', ignore=shutil.ignore_patterns(
      '*_test.py', '__pycache__', 'releases.json'))
  for name in 'JAX_PATCH_ROOT', 'JAX_PATCH_CACHE':
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('PYTHON', sys.executable)
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'links'))
  for name in 'AUTHOR', 'COMMITTER':
    monkeypatch.setenv(f'GIT_{name}_NAME', 'Dev')
    monkeypatch.setenv(f'GIT_{name}_EMAIL', 'dev@example.com')
  sdist = _sdist(tmp_path / 'links', '1.1', _CODE)
  (repo / 'ci/releases.json').write_text(json.dumps(dict(revision=1, releases=[
      dict(version='1.1', sdist=sdist.name, jaxlib='1.1', python='>=3.9',
           sha256=hashlib.sha256(sdist.read_bytes()).hexdigest(), patches='.',
           tested='never', files={})])))
  tree = tmp_path / 'tree'
  _run(repo / 'ci/jax_patch.py', 'open', '--stock', tree)
  (tree / 'jax/_src/a.py').write_text(_CODE.replace('X = 1', 'X = 2'))
  _run(repo / 'ci/jax_patch.py', 'refresh', tree)
  patch = repo / 'jax/_src/a.py.patch'
  patch.write_text(patch.read_text().replace('Description: TODO',
                                             'Description: mine'))
  return repo


def _read(repo):
  return {f: f.read_bytes() for f in repo.rglob('*')
          if f.is_file() and '__pycache__' not in f.parts}


def _patch_dirs(repo):
  data = json.loads((repo / 'ci/releases.json').read_text())
  return {r['version']: r['patches'] for r in data['releases']}


def _new_release(repo, version, content, *args, **kwargs):
  _sdist(repo.parent / 'links', version, content)
  said = _run(repo / 'ci/new_release.sh', version, *args, **kwargs)
  if 'code' not in kwargs:
    tree = repo.parent / version
    _run(repo / 'ci/jax_patch.py', 'open', '--release', version, tree)
    assert 'X = 2' in (tree / 'jax/_src/a.py').read_text()
  return said


def test_release_with_the_same_patches(repo):
  _new_release(repo, '1.2', _CODE.replace('line 0', 'LINE 0'))
  assert _patch_dirs(repo) == {'1.2': '.', '1.1': '.'}
  assert not (repo / 'backports').exists()
  assert 'already' in _run(repo / 'ci/new_release.sh', '1.2', code=2)


def test_newer_and_older_release(repo):
  _new_release(repo, '1.2', '# more\n' + _CODE)
  assert _patch_dirs(repo) == {'1.2': '.', '1.1': 'backports/1.1'}
  _new_release(repo, '1.0', '# more\n# more\n' + _CODE)
  assert _patch_dirs(repo) == {
      '1.2': '.', '1.1': 'backports/1.1', '1.0': 'backports/1.0'}
  for directory in '.', 'backports/1.1', 'backports/1.0':
    patch = repo / directory / 'jax/_src/a.py.patch'
    assert patch.read_text().startswith('Description: mine\n')


def test_release_that_does_not_fit(repo):
  code = _CODE.replace('X = 1', 'X = 7')
  before = _read(repo)
  said = _new_release(repo, '1.2', code, code=2)
  port = repo / 'build/port-1.2'
  assert f'finish the patched tree {port}' in said and said.count('\n') == 1
  (port / 'mine').write_text('half done')
  said = _new_release(repo, '1.2', code, code=2)
  assert f'{port} is there' in said and (port / 'mine').exists()
  a = port / 'jax/_src/a.py'
  a.write_text(_CODE.replace('X = 1', 'X = 2'))
  said = _new_release(repo, '1.2', code, port, code=2)
  assert 'a.py.rej is there' in said and said.count('\n') == 1
  assert {k: v for k, v in _read(repo).items() if k in before} == before
  a.with_name('a.py.rej').unlink()
  _new_release(repo, '1.2', code, 'port-1.2', cwd=port.parent)
  assert _patch_dirs(repo) == {'1.2': '.', '1.1': 'backports/1.1'}


def test_release_that_lacks_a_patched_file(repo):
  tree = repo.parent / 'tree'
  (tree / 'jax/_src/b.py').write_text('Y = 2\n')
  _run(repo / 'ci/jax_patch.py', 'refresh', tree)
  files = {'jax/_src/a.py': _CODE}
  _sdist(repo.parent / 'links', '1.2', files)
  run = subprocess.run([repo / 'ci/new_release.sh', '1.2'], text=True,
                       capture_output=True, check=False)
  assert run.returncode == 2
  assert run.stdout == 'jax/_src/b.py: not in this JAX\n'
  port = repo / 'build/port-1.2'
  said = _new_release(repo, '1.2', files, port, code=2)
  assert 'add --drop jax/_src/b.py' in said
  _new_release(repo, '1.2', files, port, '--drop', 'jax/_src/b.py')
  assert not (repo / 'jax/_src/b.py.patch').exists()
  assert (repo / 'backports/1.1/jax/_src/b.py.patch').exists()


def test_shared_patches_whatever_the_order(tmp_path, repo):
  other = _CODE.replace('# line 29', '# LINE 29')
  code = {'1.0': _CODE, '1.2': other, '1.3': _CODE}
  layouts = []
  for order in ('1.0', '1.2', '1.3'), ('1.3', '1.2', '1.0'), ('1.2', '1.3'):
    copy = tmp_path / '-'.join(order)
    shutil.copytree(repo, copy)
    for version in order:
      _sdist(tmp_path / 'links', version, code[version])
      run = subprocess.run([copy / 'ci/new_release.sh', version], text=True,
                           capture_output=True, check=False)
      if run.returncode:
        tree = copy / 'build' / f'port-{version}'
        (tree / 'jax/_src/a.py').write_text(
            code[version].replace('X = 1', 'X = 2'))
        (tree / 'jax/_src/a.py.rej').unlink()
        _run(copy / 'ci/new_release.sh', version, tree)
    layouts.append(_patch_dirs(copy))
    for patch in copy.rglob('*.patch'):
      assert patch.read_text().startswith('Description: mine\n')
  shared = {'1.3': '.', '1.2': 'backports/1.2', '1.1': '.'}
  assert layouts == [{**shared, '1.0': '.'}] * 2 + [shared]


def test_patches_of_the_next_newer_release(repo):
  _new_release(repo, '1.0', _CODE.replace('# line 29', '# old'), code=2)
  shutil.rmtree(repo / 'build')
  port = repo / 'build/port-0.9'
  _new_release(repo, '0.9', _CODE.replace('# line 29', '# old'), code=2)
  (port / 'jax/_src/a.py.rej').unlink()
  (port / 'jax/_src/a.py').write_text(
      _CODE.replace('# line 29\nX = 1', '# old\nX = 2'))
  _new_release(repo, '0.9', _CODE.replace('# line 29', '# old'), port)
  _new_release(repo, '1.0', _CODE)  # Only the newer one's patches apply.
  assert _patch_dirs(repo) == {'1.1': '.', '1.0': '.', '0.9': 'backports/0.9'}


def test_release_refusals(repo):
  def refused(text, *args, **env):
    said = _run(repo / 'ci/new_release.sh', *args, code=2,
                env={**os.environ, **env})
    assert text in said and said.count('\n') == 1, said
  before = _read(repo)
  tree = repo.parent / 'tree'
  refused('not a version')
  refused("'' is not a version", '')
  refused('x/../y is not a version', 'x/../y')
  refused('unknown argument --x', '1.2', '--x')
  refused('unknown argument c', '1.2', 'b', 'c')
  refused('is for a TREE', '1.2', '--drop', 'jax/_src/a.py')
  refused('does not run pip', '1.2', PYTHON='none')
  refused('does not run pip', '1.2', PYTHON='/bin/false')
  # Nothing of these is there to download.
  refused('has JAX 1.1 already', '1.1', PIP_FIND_LINKS='/none')
  refused('no such directory: none', '1.2', 'none')
  refused(f'{repo} is not JAX', '1.2', repo)
  refused(f'{tree} is JAX 1.1, not 1.2', '1.2', tree)
  (tree / 'jax/version.py').write_text(_VERSION.format('1.2'))
  (tree / 'jax/_src/a.py.rej').touch()
  refused('a.py.rej is there', '1.2', tree)
  said = _run(repo / 'ci/new_release.sh', '9.9', code=2)
  assert said == ('new_release.sh: cannot download JAX 9.9: ERROR: Could not '
                  'find a version that satisfies the requirement jax==9.9\n')
  assert _read(repo) == before


def test_setup(repo, monkeypatch):
  tiny = {'jax/__init__.py': '', 'jax/version.py': _VERSION.format('1.1'),
          'jax/_src/a.py': _CODE, 'jax/_src/b.py': 'Y = 1\n'}
  _wheel(repo.parent / 'links', 'jax', tiny)
  _wheel(repo.parent / 'links', 'jaxlib')
  (repo / 'ci/requirements-test.txt').write_text('')
  (repo / 'examples').mkdir()
  (repo / 'examples/close_over_explicit_mesh.py').write_text(
      'import jax._src.a\nprint("example:", jax._src.a.X)\n')
  other = repo.parent / 'other'  # Must not be taken for the environment's JAX.
  for name, text in tiny.items():
    (other / name).parent.mkdir(parents=True, exist_ok=True)
    (other / name).write_text(text)
  monkeypatch.setenv('PYTHONPATH', str(other))
  monkeypatch.setenv('JAX_PATCH_PYTHON', sys.executable)
  monkeypatch.delenv('JAX_PATCH_VENV', raising=False)
  monkeypatch.delenv('JAX_PATCH_JAX', raising=False)
  def setup(text, x=2):
    said = _run(repo / 'ci/setup.sh')
    assert said.endswith(f'example: {x}\n') and text in said, said
    assert (other / 'jax/_src/a.py').read_text() == _CODE
  setup('Installing JAX 1.1')
  a, = repo.glob('.venv/lib/python*/site-packages/jax/_src/a.py')
  before = {f: f.stat().st_mtime for f in repo.rglob('*')
            if '__pycache__' not in f.parts}
  setup('already applied')
  assert before == {f: f.stat().st_mtime for f in before}
  _run(repo / 'ci/jax_patch.py', 'revert', a.parent.parent.parent)
  setup('applied: JAX 1.1')
  a.write_text('X = 9\n')
  setup('Reinstalling JAX 1.1')
  a.unlink()
  setup('Reinstalling JAX 1.1')
  tree = repo.parent / 'tree'
  (tree / 'jax/_src/a.py').write_text(_CODE.replace('X = 1', 'X = 3'))
  for y in 'Y = 2\n', 'Y = 1\n':  # Adds a patch, then drops it.
    (tree / 'jax/_src/b.py').write_text(y)
    _run(repo / 'ci/jax_patch.py', 'refresh', tree,
         *(['--drop', 'jax/_src/b.py'] if y == 'Y = 1\n' else []))
    setup('Reinstalling JAX 1.1', 3)
    assert (a.parent / 'b.py').read_text() == y
  (repo / '.venv/.made_by_setup').write_text('')  # As if it had been killed.
  setup('Installing JAX 1.1', 3)


@pytest.fixture(name='checkout')
def _checkout(repo, tmp_path):
  """A git checkout of JAX 1.1, and what is to be added to it."""
  checkout = tmp_path / 'checkout'
  for name, text in {
      'jax/version.py': '_version = "1.1"\n', 'jax/_src/a.py': _CODE,
      'tests/BUILD': _UPSTREAM_BUILD, 'tests/shard_map_test.py': _UPSTREAM_TEST,
      'CHANGELOG.md': '# Changes\n\n## JAX 1.1\n\n* Old\n',
      'pyproject.toml': ''}.items():
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text(text)
  _git(checkout, 'init', '-q', '-b', 'main')
  _git(checkout, 'add', '-A')
  _git(checkout, 'commit', '-q', '-m', 'x')
  (repo / 'BUILD').write_text(_BUILD)
  (repo / 'tests').mkdir()
  (repo / 'tests/new_test.py').write_text('# SPDX\n"""Doc."""\n')
  return checkout


def _git(checkout, *args):
  return _run('git', '-C', checkout, *args)


def _refused(repo, text, *args):
  said = _run(repo / 'ci/upstream_branch.sh', *args, code=2)
  assert text in said.splitlines()[-1]
  assert said.count('upstream_branch.sh: ') == 1


def test_upstream_branch(repo, checkout):
  said = _run(repo / 'ci/upstream_branch.sh', checkout)
  assert 'tests/new_test.py' in said and '//tests:new_test_cpu' in said
  assert _git(checkout, 'status', '--porcelain') == ''
  assert _git(checkout, 'log', '--format=%s').splitlines()[1:] == ['x']
  read = lambda name: (checkout / name).read_text()
  assert read('jax/_src/a.py') == _CODE.replace('X = 1', 'X = 2')
  assert read('tests/BUILD') == _UPSTREAM_BUILD.replace(
      ')\n\nother', ')\n\n' + _BUILD.split('\n\n')[1] + '\nother')
  new = (repo / 'ci/upstream/replaced_test.txt').read_text()
  head, tail = _UPSTREAM_TEST.split('  @decorator')
  assert read('tests/shard_map_test.py') == (
      head + new + '\n  def test_after' + tail.split('  def test_after')[1])
  assert read('CHANGELOG.md') == (
      '# Changes\n\n## Unreleased\n\n* New features\n'
      + (repo / 'ci/upstream/changelog.md').read_text()
      + '\n## JAX 1.1\n\n* Old\n')
  header, _, doc = read('tests/new_test.py').partition('\n\n')
  assert 'JAX Authors' in header and 'SPDX' not in header
  assert doc == '"""Doc."""\n'
  _refused(repo, 'has a branch', checkout)


def test_upstream_entry_in_new_features(repo, checkout):
  (checkout / 'CHANGELOG.md').write_text(
      '## Unreleased\n\n* New features\n  * One\n\n## JAX 1.1\n')
  _git(checkout, 'commit', '-qam', 'y')
  _run(repo / 'ci/upstream_branch.sh', checkout)
  entry = (repo / 'ci/upstream/changelog.md').read_text()
  assert (checkout / 'CHANGELOG.md').read_text() == (
      f'## Unreleased\n\n* New features\n{entry}  * One\n\n## JAX 1.1\n')


def test_upstream_refusals(repo, checkout):
  _refused(repo, 'no such directory', '/none')
  for name in 'a b', 'a..b', '-x', '@{-1}', 'a.lock':
    _refused(repo, f'{name} cannot name a branch', '--branch', name, checkout)
  _git(checkout, 'branch', 'one/two')
  for name in 'one', 'one/two', 'one/two/three':
    _refused(repo, 'has a branch one/two already', '--branch', name, checkout)
  _git(checkout, 'branch', '-D', 'one/two')
  _refused(repo, 'not the top of a git checkout', checkout / 'jax')
  (checkout / 'new').touch()
  _refused(repo, 'has changes', checkout)
  (checkout / 'new').unlink()
  (checkout / 'tests/new_test.py').touch()
  _git(checkout, 'add', '-A')
  _git(checkout, 'commit', '-qm', 'y')
  _refused(repo, 'has tests/new_test.py already', checkout)
  assert _git(checkout, 'branch', '--format=%(refname:short)') == 'main\n'
  _git(checkout, 'rm', '-q', 'CHANGELOG.md')
  _refused(repo, 'is not JAX', checkout)


def test_upstream_without_a_patched_file(repo, checkout):
  _git(checkout, 'rm', '-q', 'jax/_src/a.py')
  _git(checkout, 'commit', '-qm', 'y')
  run = subprocess.run([repo / 'ci/upstream_branch.sh', checkout], text=True,
                       capture_output=True, check=False)
  assert run.returncode == 2
  first, last = run.stderr.splitlines()
  assert first == 'jax/_src/a.py: not in this JAX'
  assert 'no branch is made' in last


def test_upstream_hunk_that_does_not_apply(repo, checkout):
  (checkout / 'jax/_src/a.py').write_text(_CODE.replace('X = 1', 'X = 7'))
  _git(checkout, 'commit', '-qam', 'y')
  _refused(repo, 'no branch is made', checkout)
  assert _git(checkout, 'status', '--porcelain', '--branch') == '## main\n'
  _refused(repo, '.rej files', '--reject', checkout)
  assert (checkout / 'jax/_src/a.py.rej').exists()
  assert _git(checkout, 'branch', '--show-current').startswith('shard-map')
