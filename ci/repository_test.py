# SPDX-License-Identifier: Apache-2.0
"""What stands in two places of this repository says the same in both."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
_SCRIPTS = sorted(str(f.relative_to(ROOT)) for f in (ROOT / 'ci').glob('*')
                  if f.is_file() and os.access(f, os.X_OK))


def test_every_test_has_a_bazel_target():
  build = (ROOT / 'BUILD').read_text()
  targets = dict(re.findall(r'name = "(\w+)",\n    srcs = \[(.*?)\]', build,
                            re.S))
  tests = {p.stem for p in (ROOT / 'tests').glob('*_test.py')}
  assert set(targets) == tests
  for name, sources in targets.items():
    assert f'"{name}.py"' in sources


def test_readme_lists_the_releases():
  rows = re.findall(r'^\| (\d[\d., ]*) \|', (ROOT / 'README.md').read_text(),
                    re.M)
  listed = [v for row in rows for v in row.split(', ')]
  releases = json.loads((ROOT / 'ci/releases.json').read_text())['releases']
  assert listed == [r['version'] for r in releases]


def test_links_lead_somewhere():
  for page in [*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')]:
    for link in re.findall(r'\]\(([^)#]+)', page.read_text()):
      if '://' not in link:
        assert (page.parent / link).exists(), (page.name, link)


def test_readme_shows_the_example():
  # the README's program is the one that ci/setup.sh runs, line for line
  def code(text):
    return {line.split('#')[0].strip() for line in text.splitlines()} - {''}
  readme = (ROOT / 'README.md').read_text()
  program = re.search(r'```python\n(mesh = .*?)```', readme, re.S).group(1)
  example = (ROOT / 'examples' / 'close_over_explicit_mesh.py').read_text()
  shown = {line for line in code(program) if not line.startswith('print')}
  assert shown - code(example) == set()


def _by_hand():
  """The README's blocks of commands to patch by hand."""
  readme = (ROOT / 'README.md').read_text()
  return [block for block in re.findall('```sh\n(.*?)```', readme, re.S)
          if "-name '*.patch'" in block]


def test_readme_patches_by_hand(tmp_path, monkeypatch):
  for name in 'JAX_PATCH_ROOT', 'GIT_DIR':
    monkeypatch.delenv(name, raising=False)
  checkout = tmp_path / 'checkout'
  blocks = _by_hand()
  assert len(blocks) == 2
  # What is not the top of a checkout may be inside of one.
  for block, tree in zip(blocks, (checkout, checkout / 'site')):
    subprocess.run([sys.executable, ROOT / 'ci' / 'jax_patch.py', 'open',
                    '--stock', tree], check=True)
    subprocess.run(['git', 'init', '-q', checkout], check=True)
    run = subprocess.run(
        ['bash', '-euc', block.replace('path/to/this/repository', str(ROOT))],
        cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith('applied: JAX '), run.stdout


@pytest.mark.parametrize('script', _SCRIPTS)
def test_help(script):
  def run(argument):
    return subprocess.run([ROOT / script, argument], capture_output=True,
                          text=True, check=False)
  said = run('--help')
  assert said.returncode == 0 and not said.stderr
  assert 'usage: ' in said.stdout and pathlib.Path(script).name in said.stdout
  if script != 'ci/run_pytest_cpu.sh':  # Its arguments are pytest's.
    said = run('--bogus')
    assert said.returncode == 2 and not said.stdout
    assert 'Traceback' not in said.stderr


@pytest.mark.parametrize('args', [[], ['0'], ['x'], ['1', 'x'],
                                  ['1', '2', '3']])
def test_fuzz_refuses(args):
  run = subprocess.run([ROOT / 'ci' / 'fuzz.sh', *args], capture_output=True,
                       text=True, check=False)
  assert run.returncode == 2 and run.stderr.count('\n') == 1


def test_contributing_lists_the_commands():
  text = (ROOT / 'CONTRIBUTING.md').read_text()
  assert set(re.findall(r'^\| `(ci/[\w.]+)', text, re.M)) == set(_SCRIPTS)
