#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Edits a JAX tree for ci/upstream_branch.sh; prints the files edited."""

import datetime
from pathlib import Path
import re
import sys

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent.parent
_REPLACED = 'test_close_over_explicit_sharded_input_error'


def _text(name):
  return (_HERE / name).read_text()


def _replace_test(text):
  """Puts replaced_test.txt in the place of the test it supersedes."""
  method = re.compile(
      rf'(  @.*\n)*  def {_REPLACED}\(.*\n((    .*)?\n)*?(?=\n  \S|\n?\S|\Z)')
  new, n = method.subn(lambda _: _text('replaced_test.txt'), text)
  if n != 1:
    sys.exit(f'tests/shard_map_test.py has no {_REPLACED}')
  return new


def _expect_no_reshard(text):
  """Turns around an assertion that a closure has an equation of its own.

  It is in test_shmap_close_over_partial_auto of pjit_test.py.
  """
  return re.sub(
      r"(def test_shmap_close_over_partial_auto\((?:.*\n)*?.*)"
      r"assertIn\('reshard'", r"\1assertNotIn('reshard'", text, count=1)


def _add_targets(text):
  """Adds the targets of BUILD after that of shard_map_test."""
  targets = re.findall(r'^jax\w*_test\(\n(?:.*\n)*?^\)\n',
                       (_ROOT / 'BUILD').read_text(), re.M)
  old = re.search(r'^    name = "shard_map_test",\n(?:.*\n)*?^\)\n', text, re.M)
  if not targets or not old:
    sys.exit('no targets in BUILD, or no shard_map_test in tests/BUILD')
  return text[:old.end()] + ''.join('\n' + t for t in targets) + (
      text[old.end():])


def _add_entry(text):
  """Adds changelog.md to the new features that are unreleased."""
  if not re.search(r'^## Unreleased$', text, re.M):
    text = re.sub(r'^(?=## )', '## Unreleased\n\n', text, count=1, flags=re.M)
  head, title, rest = re.split(r'^(## Unreleased\n)', text, maxsplit=1,
                               flags=re.M)
  section, *after = re.split(r'^(?=## )', rest, maxsplit=1, flags=re.M)
  heading = '* New features\n'
  if heading not in section:
    section = f'\n{heading}{section}'
  section = section.replace(heading, heading + _text('changelog.md'), 1)
  return ''.join([head, title, section, *after])


def _add_tests(tree):
  """Adds tests/, with the header of JAX's files; yields their paths."""
  header = re.match('(#.*\n)+', (tree / 'tests/shard_map_test.py').read_text())
  header = re.sub(r'Copyright \d+', f'Copyright {datetime.date.today().year}',
                  header[0])
  for f in sorted((_ROOT / 'tests').glob('*.py')):
    new = tree / 'tests' / f.name
    if new.exists():
      sys.exit(f'tests/{f.name} exists already')
    new.write_text(re.sub(r'\A(#.*\n)*\n*', header + '\n', f.read_text()))
    yield f'tests/{f.name}'


def main():
  tree = Path(sys.argv[1])
  for name, edit in (('tests/shard_map_test.py', _replace_test),
                     ('tests/pjit_test.py', _expect_no_reshard),
                     ('tests/BUILD', _add_targets),
                     ('CHANGELOG.md', _add_entry)):
    f = tree / name
    if f.exists():
      f.write_text(edit(f.read_text()))
      print(name)
  print(*_add_tests(tree), sep='\n')


if __name__ == '__main__':
  main()
