#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Applies, reverts, checks and refreshes the patches of this repository.

TARGET is a JAX checkout, an unpacked sdist, a site-packages directory, or a
Python interpreter (then: the JAX which that interpreter imports).

ci/releases.json holds the revision of the patch set and, for each release,
its sdist, its patch directory, and the sha256 of every patched file before
("stock") and after (one per revision). Patch files are generated: edit a tree
made by `open`, then run `refresh`. Only the header of a patch, all that is
above its "diff --git" line, is written by hand; `refresh` keeps it. For a new
revision, raise "revision" in releases.json, then `refresh` every release.

A symbolic link in a target's jax/ is refused: what it leads to, as a package
cache, may be in others' use.

Bad input gets one line on stderr and exit status 2.

environment variables:
  JAX_PATCH_ROOT   the repository (default: the one that holds this script)
  JAX_PATCH_CACHE  directory of downloaded sdists (default: its .cache)
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
from pathlib import Path
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from urllib import parse

_ROOT = Path(os.environ.get('JAX_PATCH_ROOT') or
             Path(__file__).resolve().parent.parent).resolve()
_DATA = _ROOT / 'ci' / 'releases.json'
_TEMP_SUFFIX = '.jax_patch'
_PROBE_SECONDS = 60
_RELEASE_FIELDS = {'version': str, 'sdist': str, 'sha256': str, 'jaxlib': str,
                   'python': str, 'patches': str, 'tested': str, 'files': dict}

_HEADER = '''\
Description: TODO
Author: TODO
Bug: https://github.com/jax-ml/jax/issues/29162
Forwarded: no

'''

# Run by the interpreter given as TARGET; does not import JAX.
_PROBE = '''
import importlib.metadata as metadata, importlib.util as util, json
spec = util.find_spec("jax")
try:
  url = metadata.distribution("jax").read_text("direct_url.json")
except metadata.PackageNotFoundError:
  url = None
print(json.dumps([spec and spec.origin, url]))
'''


class Refusal(Exception):
  """Something the user has to know, in one line."""


@contextlib.contextmanager
def _naming(f):
  """Makes errors name `f`; those of a write name no file."""
  try:
    yield
  except OSError as e:
    e.filename = str(f)
    raise


def _bytes(f):
  if f.exists() and not f.is_file():  # Might never end.
    raise Refusal(f'not a regular file: {f}')
  return f.read_bytes()


def _text(f):
  try:
    return _bytes(f).decode()
  except UnicodeDecodeError:
    raise Refusal(f'not UTF-8: {f}') from None


def _sha256(data):
  return hashlib.sha256(data).hexdigest()


def _numbers(version):
  return tuple(map(int, re.findall(r'\d+', version)))


def _fits_python(spec, python):
  """Whether e.g. (3, 12) satisfies e.g. '>=3.11,<3.15'."""
  for clause in spec.split(','):
    op, bound = clause[:-len(clause.lstrip('<>='))], clause.lstrip('<>=')
    if op not in ('>=', '<'):
      raise Refusal(f'releases.json: cannot read Python version {spec!r}')
    if (python >= _numbers(bound)) != (op == '>='):
      return False
  return True


def _data_problem(data):
  """What is wrong with the form of releases.json, or None."""
  if not isinstance(data, dict) or not isinstance(data.get('revision'), int):
    return 'no revision'
  if not isinstance(data.get('releases'), list) or not data['releases']:
    return 'no releases'
  for i, r in enumerate(data['releases']):
    for name, kind in _RELEASE_FIELDS.items():
      if not isinstance(r, dict) or not isinstance(r.get(name), kind):
        return f'release {i} has no {name}'
    for path, known in r['files'].items():
      if not isinstance(known, dict) or 'stock' not in known or not all(
          k == 'stock' or k.isdigit() for k in known):
        return f'release {i} has no sha256s of {path}'
  return None


class _Data:
  """ci/releases.json."""

  def __init__(self):
    try:
      self.json = json.loads(_text(_DATA))
      problem = _data_problem(self.json)
    except ValueError as e:
      problem = e
    if problem:
      raise Refusal(f'{_DATA}: {problem}')
    self.revision = self.json['revision']
    self.releases = sorted(self.json['releases'], reverse=True,
                           key=lambda r: _numbers(r['version']))

  def nearest(self, version):
    """The newest release not newer than `version`, else the oldest."""
    older = [r for r in self.releases
             if _numbers(r['version']) <= _numbers(version)]
    return (older or self.releases[-1:])[0]

  def release(self, version=None):
    if version is None:
      return self.releases[0]
    for r in self.releases:
      if r['version'] == version:
        return r
    raise Refusal(f'no patches for JAX {version}; the nearest release that '
                  f'has them is {self.nearest(version)["version"]}')

  def hashes(self, release):
    """Path -> (stock, patched) sha256, at the current revision."""
    now = str(self.revision)
    found = {path: (h['stock'], h[now])
             for path, h in release['files'].items() if now in h}
    if not found:
      raise Refusal(f'releases.json has no files at revision {now} of JAX '
                    f'{release["version"]}; run refresh')
    return found

  def save(self):
    _write_if_changed(_DATA, (json.dumps(self.json, indent=2) + '\n').encode())


def _patch_dir(release):
  return _ROOT / release['patches']


def _patch_file(release, path):
  return _patch_dir(release) / (path + '.patch')


def _write_if_changed(path, data):
  if path.is_file() and path.read_bytes() == data:
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  temp = path.with_name(path.name + _TEMP_SUFFIX)
  with _naming(path):
    temp.write_bytes(data)
    os.replace(temp, path)
  print(f'wrote {os.path.relpath(path, _ROOT)}')


# Targets.


def _refuse_editable(direct_url):
  try:
    info = json.loads(direct_url or '{}')
    url = info.get('dir_info', {}).get('editable') and parse.urlsplit(
        info['url'])
  except (ValueError, LookupError, AttributeError, TypeError):
    raise Refusal("cannot read the direct_url.json of the target's JAX"
                  ) from None
  if url:
    raise Refusal('this is an editable install: point at the checkout, '
                  + parse.unquote(url.path))


def _locate(target):
  """The directory that holds the target's jax/."""
  if not str(target):
    raise Refusal('the target is empty')
  path = Path(target)
  if not path.exists():
    path = Path(shutil.which(target) or target)
  if path.is_file():
    return _locate_interpreter(path)
  if not path.exists():
    raise Refusal(f'no such file or directory: {target}')
  if not path.is_dir():
    raise Refusal(f'neither a file nor a directory: {target}')
  if not (path / 'jax' / 'version.py').is_file():
    for url in path.glob('jax-*.dist-info/direct_url.json'):
      _refuse_editable(_text(url))
    raise Refusal(f'{target} is not JAX: it has no jax/version.py')
  return path.resolve()


def _ask(python):
  """Runs the probe; returns its output, or refuses.

  The program may be anything: its time and output are limited, and it gets no
  pipe, which a child that it leaves behind could hold open.
  """
  limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24,) * 2)
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    try:
      run = subprocess.Popen(
          [os.path.abspath(python), '-c', _PROBE], cwd=os.sep, stdout=out,
          stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
          preexec_fn=limit)
      try:
        error = run.wait(_PROBE_SECONDS) and f'exit status {run.returncode}'
      except BaseException:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        raise
    except subprocess.TimeoutExpired:
      raise Refusal(f'{python} does not run as Python: no answer in '
                    f'{_PROBE_SECONDS} seconds') from None
    except OSError as e:
      error = e.strerror
    said = []
    for f in out, err:
      f.seek(0)
      said.append(f.read().decode(errors='replace').strip())
  if error:
    raise Refusal(f'{python} does not run as Python 3.9 or newer: '
                  + (said[1].splitlines() or [error])[-1])
  return said[0]


def _locate_interpreter(path):
  said = _ask(path)
  try:
    origin, url = json.loads(said.splitlines()[-1])
    root = Path(origin or os.sep).parent.parent
    if not root.is_absolute():
      raise ValueError
  except (ValueError, IndexError, TypeError):
    raise Refusal(f'{path} is not a Python interpreter') from None
  _refuse_editable(url)
  if not origin:
    raise Refusal(f'{path} has no JAX installed')
  for archive in root, *root.parents:
    if archive.is_file():
      raise Refusal(f'the JAX of {path} is in a zip file, {archive}; '
                    'install it unpacked')
  return _locate(root)


def _version(root):
  text = _text(root / 'jax' / 'version.py')
  found = re.search(r'''^_version = ['"]([\d.]+)['"]''', text, re.M)
  if not found:
    raise Refusal(f'{root} is not JAX: jax/version.py has no _version')
  return found[1]


@contextlib.contextmanager
def _locked(root, exclusive):
  """Holds a lock that leaves no file and ends with the process."""
  fd = os.open(root / 'jax', os.O_RDONLY)
  try:
    mode = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
      fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f'waiting for another run on {root}', file=sys.stderr)
      fcntl.flock(fd, mode)
    yield
  finally:
    os.close(fd)


class _Tree:
  """What a target holds, by sha256."""

  def __init__(self, data, root):
    self.data, self.root = data, root
    self.version = _version(root)
    self.release = data.release(self.version)
    self.hashes = data.hashes(self.release)
    self.states = {}  # path -> 'stock', 'patched', a revision, or 'changed'
    for path, known in self.release['files'].items():
      try:
        sha = _sha256(_bytes(root / path))
      except FileNotFoundError:
        sha = None
      if sha == known['stock']:
        state = 'stock'
      elif sha == known.get(str(data.revision)):
        state = 'patched'
      else:
        state = next((int(k) for k, v in known.items() if v == sha), 'changed')
      if path in self.hashes or isinstance(state, int):
        self.states[path] = state
    self.leftovers = sorted(
        {f for path in self.states
         for f in (root / path).parent.glob('.*' + _TEMP_SUFFIX)})

  def having(self, state):
    return [p for p, s in self.states.items() if s == state]

  def status(self):
    """Returns (state, revision or None, detail)."""
    values = set(self.states.values())
    older = [s for s in values if isinstance(s, int)]
    if 'changed' in values:
      return 'changed', None, ', '.join(self.having('changed'))
    if older:
      return 'older', max(older), f'the current revision is {self._now}'
    if len(values) > 1 or self.leftovers:
      return 'interrupted', None, (
          f'{len(self.having("patched"))} of {len(self.states)} files are '
          'patched; run apply or revert')
    if values == {'patched'}:
      return 'applied', self._now, ''
    return 'stock', None, ''

  @property
  def _now(self):
    return self.data.revision

  def check_own(self):
    """Refuses a tree whose files are not the release's or the patches'."""
    for path in self.states:
      for f in (self.root / path, *(self.root / path).parents):
        if self.root in f.parents and f.is_symlink():
          raise Refusal(
              f'{f} is a symbolic link to {f.resolve()}, which others may use: '
              'install JAX with --link-mode hardlink or --link-mode copy')
    state, revision, detail = self.status()
    if state == 'changed':
      raise Refusal(
          f'not the files of JAX {self.version}: {detail} in {self.root} '
          '(changed by hand, or a checkout of another commit)')
    if state == 'older':
      raise Refusal(
          f'{self.root} has revision {revision} of the patches and this is '
          f'revision {self._now}; first revert with revision {revision}, or '
          f'reinstall JAX {self.version}')

  def check_writable(self, paths):
    for f in (self.root / p for p in paths):
      for x in (f, f.parent):
        if os.statvfs(x).f_flag & os.ST_RDONLY:
          raise Refusal(f'on a read-only file system: {x}')
        if not os.access(x, os.W_OK):
          raise Refusal(f'no permission to write {x}')


# Patching.


def _clean_env(directory):
  """An environment in which no repository or setting sways git."""
  env = {k: v for k, v in os.environ.items() if not k.startswith('GIT_')}
  return dict(env, LC_ALL='C', GIT_CONFIG_NOSYSTEM='1',
              GIT_CONFIG_GLOBAL=os.devnull, HOME=str(directory),
              XDG_CONFIG_HOME=str(directory),
              GIT_CEILING_DIRECTORIES=str(directory.parent))


@contextlib.contextmanager
def _scratch():
  with _naming(tempfile.gettempdir()), tempfile.TemporaryDirectory(
      prefix='jax_patch') as d:
    yield Path(d).resolve()


def _run_patch(patch, content, path, reverse):
  """Returns `content` patched, and the complaints of the programs tried."""
  commands = [('git', 'apply', '--whitespace=nowarn'),
              ('patch', '-p1', '-s', '-f', '-F0', '-i')]
  commands = [c for c in commands if shutil.which(c[0])]
  if not commands:
    raise Refusal('no patch program: install git or patch')
  for program, *args in commands:
    with _scratch() as d:
      f = d / path
      f.parent.mkdir(parents=True)
      f.write_bytes(content)
      flags = ['-R'] if reverse else []
      run = subprocess.run([program, *flags, *args, str(patch)]
                           if program == 'patch' else
                           [program, *args, *flags, str(patch)],
                           cwd=d, env=_clean_env(d), text=True, check=False,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)
      if not run.returncode:
        return f.read_bytes()
  what = (run.stdout.strip() or f'{program} failed').splitlines()[-1]
  raise Refusal(f'{patch} does not apply: {what}')


def _contents(tree, paths, to):
  """The checked bytes that `paths` are to have: 'patched' or 'stock'."""
  new = {}
  for path in paths:
    patch = _patch_file(tree.release, path)
    if not patch.is_file():
      raise Refusal(f'no such patch: {patch}')
    new[path] = _run_patch(patch, (tree.root / path).read_bytes(), path,
                           reverse=to == 'stock')
    if _sha256(new[path]) != tree.hashes[path][to == 'patched']:
      raise Refusal(f'{patch} does not give the sha256 in releases.json; '
                    'run refresh')
  return new


def _write_temp(f, data):
  """Writes a file beside `f`, with its mode, that bytecode can't match."""
  temp = f.with_name(f'.{f.name}{_TEMP_SUFFIX}')
  old = f.stat()
  fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  with _naming(f), os.fdopen(fd, 'wb') as out:
    out.write(data)
    out.flush()
    if hasattr(os, 'fchown') and (old.st_uid, old.st_gid) != (
        os.fstat(fd).st_uid, os.fstat(fd).st_gid):
      with contextlib.suppress(PermissionError):
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, old.st_mode & 0o7777)
    # Bytecode is valid for a source's size and mtime in whole seconds, so no
    # two versions of a file may share an mtime.
    mtime = max(int(time.time()), int(old.st_mtime) + 1)
    os.utime(fd, (mtime, mtime))
    os.fsync(fd)
  return temp


def _remove_bytecode(f):
  """Drops bytecode that is never checked against its source."""
  for pyc in (f.parent / '__pycache__').glob(f.stem + '.*.pyc'):
    with contextlib.suppress(OSError):
      pyc.unlink()


def _install(root, new):
  """Writes path -> bytes, all or none.

  Each file is replaced at once, so a killed run leaves every file either stock
  or patched, from where apply and revert can both go on.
  """
  old = {path: (root / path).read_bytes() for path in new}
  done = []
  try:
    temps = {path: _write_temp(root / path, new[path]) for path in new}
    for path, temp in temps.items():
      _remove_bytecode(root / path)
      os.replace(temp, root / path)
      done.append(path)
  except BaseException:
    _sweep(root, new)
    for path in done:
      os.replace(_write_temp(root / path, old[path]), root / path)
    raise
  for directory in {(root / path).parent for path in new}:
    with contextlib.suppress(OSError):  # Not every file system can.
      fd = os.open(directory, os.O_RDONLY)
      try:
        os.fsync(fd)
      finally:
        os.close(fd)


def _sweep(root, paths):
  for path in paths:
    f = root / path
    with contextlib.suppress(FileNotFoundError):
      f.with_name(f'.{f.name}{_TEMP_SUFFIX}').unlink()


def _switch(data, target, to):
  """Makes a target 'patched' or 'stock'; returns how many files changed."""
  root = _locate(target)
  with _locked(root, exclusive=True):
    tree = _Tree(data, root)
    tree.check_own()
    paths = [p for p, s in tree.states.items() if s != to]
    tree.check_writable(paths)
    for leftover in tree.leftovers:
      leftover.unlink()
    if paths:
      _install(root, _contents(tree, paths, to))
    tree = _Tree(data, root)
    if set(tree.states.values()) != {to}:
      raise Refusal(f'{root} was changed by another program during this run')
  return len(paths), tree


# Stock sources.


def _sdist(release, given=None):
  """The path of a release's sdist, whose sha256 is right."""
  def is_right(f):
    return f.is_file() and _sha256(f.read_bytes()) == release['sha256']
  if given:
    if not is_right(Path(given)):
      raise Refusal(f'{given} is not the sdist of JAX {release["version"]}: '
                    f'its sha256 is not {release["sha256"]}')
    return Path(given)
  cache = Path(os.environ.get('JAX_PATCH_CACHE') or _ROOT / '.cache')
  path = cache / release['sdist']
  if not is_right(path):
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as d:
      requirements = Path(d) / 'requirements.txt'
      requirements.write_text(f'jax=={release["version"]} '
                              f'--hash=sha256:{release["sha256"]}\n')
      run = subprocess.run(
          [sys.executable, '-m', 'pip', 'download', '--no-deps', '-q',
           '--no-binary=jax', '--ignore-requires-python', '--require-hashes',
           '-d', d, '-r', str(requirements)],
          capture_output=True, text=True, check=False)
      if run.returncode or not is_right(Path(d) / release['sdist']):
        errors = [line for line in run.stderr.splitlines()
                  if line.startswith('ERROR') or 'No module named' in line]
        raise Refusal(f'cannot download {release["sdist"]} (no network? else '
                      'give --sdist FILE): ' + (errors or ['pip failed'])[0])
      os.replace(Path(d) / release['sdist'], path)
  return path


def _sdist_files(sdist):
  """Yields (path, bytes) of every file of an sdist."""
  with tarfile.open(sdist) as tar:
    for member in tar:
      if member.isfile():
        yield member.name.split('/', 1)[1], tar.extractfile(member).read()


def _diff(path, old, new):
  """A unified diff as `git diff` makes it, the same on every machine."""
  with _scratch() as d:
    for side, content in (('a', old), ('b', new)):
      (d / side / path).parent.mkdir(parents=True)
      (d / side / path).write_bytes(content)
      (d / side / path).chmod(0o644)
    (d / 'attributes').write_text('*.py diff=python\n')
    try:
      run = subprocess.run(
          ['git', '-c', f'core.attributesFile={d}/attributes', 'diff',
           '--no-index', '--no-prefix', '--no-color', '-U3',
           '--diff-algorithm=histogram', f'a/{path}', f'b/{path}'],
          cwd=d, env=_clean_env(d), capture_output=True, check=False)
    except FileNotFoundError:
      raise Refusal('refresh needs git') from None
    if run.returncode > 1 or run.stderr:
      raise Refusal('git diff: ' + run.stderr.decode().strip())
    return re.sub(rb'^index .*\n', b'', run.stdout, count=1, flags=re.M)


def _header(patch):
  """What precedes the diff in a patch file; a template if there is none."""
  if not patch.is_file():
    return _HEADER.encode()
  return re.split(rb'^diff --git ', patch.read_bytes(), maxsplit=1,
                  flags=re.M)[0]


def _check_finished(tree):
  """Refuses a tree in which hunks that did not apply lie about."""
  for f in sorted(tree.glob('jax/**/*')):
    if f.suffix in ('.rej', '.orig'):
      raise Refusal(f'{f} is there: finish the tree, then remove it')


def _changes(stock, tree):
  """Path -> new bytes, of what differs in a patched tree."""
  _check_finished(tree)
  changed = {}
  for path, content in stock.items():
    f = tree / path
    if path == 'jax/version.py':  # Differs between checkout and sdist.
      continue
    if not f.is_file():
      raise Refusal(f'{tree} lacks {path}; a patch may not delete a file')
    if f.read_bytes() != content:
      changed[path] = f.read_bytes()
  if not (tree / '.git').exists() or (tree / 'PKG-INFO').exists():
    for f in sorted(tree.glob('jax/**/*.py')):
      if f.relative_to(tree).as_posix() not in stock:
        raise Refusal(f'{f} is not in the sdist; a patch may not add a file')
  return changed


# Commands.


def _list(data, args):
  """lists the releases with patches"""
  if args.json:
    print(json.dumps(data.json, indent=2))
    return
  print(f'Revision {data.revision} of the patches.')
  for r in data.releases:
    print(f'JAX {r["version"]}, jaxlib {r["jaxlib"]}, Python {r["python"]}, '
          f'patches in {r["patches"]}: {r["tested"]}')


def _pick(data, args):
  """prints the newest release for the Python that runs this, its jaxlib, and
  the newest release of all"""
  python = sys.version_info[:2]
  releases = [data.release(args.release)] if args.release else data.releases
  for r in releases:
    if _fits_python(r['python'], python):
      data.hashes(r)
      print(r['version'], r['jaxlib'], releases[0]['version'])
      return
  raise Refusal(f'JAX {releases[-1]["version"]} needs Python '
                f'{releases[-1]["python"]}; this is {python[0]}.{python[1]}')


def _check(data, args):
  """tells whether the patches would apply; changes nothing"""
  root = _locate(args.target)
  with _locked(root, exclusive=False):
    tree = _Tree(data, root)
    tree.check_own()
    paths = tree.having('stock')
    _contents(tree, paths, 'patched')
    tree.check_writable(paths)
  what = f'{len(paths)} files would change' if paths else 'already applied'
  print(f'ok: JAX {tree.version} at {root}: {what}')


def _apply(data, args):
  """applies the patches: all files or none"""
  changed, tree = _switch(data, args.target, 'patched')
  print(('applied: ' if changed else 'already applied: ') +
        f'JAX {tree.version}, revision {data.revision}, at {tree.root}')


def _revert(data, args):
  """takes the patches out again: all files or none"""
  changed, tree = _switch(data, args.target, 'stock')
  print(('reverted: ' if changed else 'already stock: ') +
        f'JAX {tree.version} at {tree.root}')


def _status(data, args):
  """tells what a target is: stock, applied, older (an earlier revision),
  changed (by hand), interrupted, or unsupported"""
  root = _locate(args.target)
  version = _version(root)
  files = {}
  try:
    data.release(version)
  except Refusal as e:
    state, revision, detail = 'unsupported', None, str(e)
  else:
    with _locked(root, exclusive=False):
      tree = _Tree(data, root)
    state, revision, detail = tree.status()
    files = tree.states
  if args.json:
    print(json.dumps(dict(
        state=state, version=version, revision=revision, target=str(root),
        detail=detail, files=files)))
  else:
    print(f'{state}: JAX {version}'
          + (f', revision {revision},' if revision else '')
          + f' at {root}' + (f': {detail}' if detail else ''))


def _open(data, args):
  """makes DIR a patched source tree of a release, to edit"""
  release = data.release(args.release)
  directory = Path(args.dir)
  if directory.exists():
    raise Refusal(f'{directory} exists')
  parent = directory.absolute().parent
  if not parent.is_dir():
    raise Refusal(f'no such directory: {parent}')
  sdist = _sdist(release, args.sdist)
  with _naming(parent), tempfile.TemporaryDirectory(
      dir=parent, prefix='.open') as d:
    tree = Path(d) / directory.name
    for path, content in _sdist_files(sdist):
      (tree / path).parent.mkdir(parents=True, exist_ok=True)
      (tree / path).write_bytes(content)
    if not args.stock:
      _switch(data, tree, 'patched')
    os.rename(tree, directory)
  print(f'opened: JAX {release["version"]} at {directory}')


def _refresh(data, args):
  """regenerates the patches and sha256s of a release from a patched tree
  (without TREE: from the patches themselves)"""
  tree = args.tree and _locate(args.tree)
  release = data.release(args.release or tree and _version(tree))
  if tree and _version(tree) != release['version']:
    raise Refusal(f'{tree} is JAX {_version(tree)}, not {release["version"]}')
  stock = {path: content
           for path, content in _sdist_files(_sdist(release, args.sdist))
           if path.startswith('jax/') and path.endswith('.py')}
  old = {p.relative_to(_patch_dir(release)).as_posix()[:-len('.patch')]: p
         for p in (_patch_dir(release) / 'jax').glob('**/*.patch')}
  if tree:
    new = _changes(stock, tree)
  else:
    for path in old:
      if path not in stock:
        raise Refusal(f'JAX {release["version"]} has no {path}')
    new = {path: _run_patch(patch, stock[path], path, reverse=False)
           for path, patch in old.items()}
  unchanged = old.keys() - new.keys()
  for path in sorted(unchanged - set(args.drop)):
    raise Refusal(f'{tree} has no change in {path}: is it half patched? To '
                  f'remove the patch, add --drop {path}')
  for path in sorted(set(args.drop) - unchanged):
    raise Refusal(f'--drop {path}: ' + ('the tree changes it' if path in new
                                        else 'it has no patch'))
  for path, content in new.items():
    patch = _patch_file(release, path)
    _write_if_changed(patch, _header(patch) + _diff(path, stock[path], content))
  for path in sorted(unchanged):
    old[path].unlink()
    print(f'removed {os.path.relpath(old[path], _ROOT)}')
  _record(data, release, stock, new)
  for other in data.releases:  # That have the same patches.
    if other is not release and other['patches'] == release['patches']:
      stock = dict(_sdist_files(_sdist(other)))
      _record(data, other, stock, {
          path: _run_patch(_patch_file(other, path), stock[path], path, False)
          for path in new})
  data.save()


def _record(data, release, stock, new):
  """Notes the sha256s of a release at this revision, keeping older ones'."""
  now = str(data.revision)
  files = {}
  for path in sorted({*release['files'], *new}):
    known = {k: v for k, v in release['files'].get(path, {}).items()
             if k not in ('stock', now)}
    if path in new:
      known[now] = _sha256(new[path])
    if known:
      files[path] = {'stock': _sha256(stock[path]), **known}
  release['files'] = files


def _parser():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(metavar='COMMAND', required=True)

  def command(f):
    text = ' '.join(f.__doc__.split())
    sub = commands.add_parser(f.__name__[1:], help=text, description=text)
    sub.set_defaults(run=f)
    return sub

  command(_list).add_argument('--json', action='store_true')
  command(_pick).add_argument('--release', metavar='V')
  for f in (_check, _apply, _revert, _status):
    sub = command(f)
    sub.add_argument(
        'target', metavar='TARGET', help='JAX checkout, unpacked sdist, '
        'site-packages directory, or Python interpreter')
  sub.add_argument('--json', action='store_true')
  for f in (_open, _refresh):
    sub = command(f)
    sub.add_argument('--release', metavar='V', help='the release '
                     '(default: the newest; for refresh, that of TREE)')
    sub.add_argument('--sdist', metavar='FILE',
                     help="the release's sdist (default: downloaded with pip)")
    if f is _open:
      sub.add_argument('--stock', action='store_true', help='do not patch it')
      sub.add_argument('dir', metavar='DIR')
    else:
      sub.add_argument('--drop', metavar='PATH', action='append', default=[],
                       help='remove the patch of this file, which TREE does '
                       'not change; may be repeated')
      sub.add_argument('tree', metavar='TREE', nargs='?')
  return parser


def main(argv=None):
  args = _parser().parse_args(argv)
  try:
    args.run(_Data(), args)
  except Refusal as e:
    error = str(e)
  except KeyboardInterrupt:
    error = 'interrupted'
  except OSError as e:
    what = {errno.EROFS: 'on a read-only file system',
            errno.EACCES: 'no permission', errno.EPERM: 'no permission',
            errno.ENOSPC: 'the disk is full', errno.EDQUOT: 'the disk is full'}
    error = what.get(e.errno, e.strerror or str(e))
    error += f': {e.filename}' if e.filename else ''
  else:
    return 0
  print(f'{Path(__file__).name}: {error}', file=sys.stderr)
  return 2


if __name__ == '__main__':
  sys.exit(main())
