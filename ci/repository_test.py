# SPDX-License-Identifier: Apache-2.0
"""What stands in two places of this repository says the same in both."""
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_every_test_has_a_bazel_target():
  build = (ROOT / 'BUILD').read_text()
  targets = re.findall(
      r'name = "(\w+)",\n    srcs = \["(\w+)\.py"\]', build)
  assert [name for name, src in targets if name != src] == []
  tests = {p.stem for p in (ROOT / 'tests').glob('*_test.py')}
  assert {name for name, _ in targets} == tests


def test_readme_lists_the_releases():
  readme = (ROOT / 'README.md').read_text()
  listed = re.findall(r'^\| (\d[\d.]*) \|', readme, re.M)
  data = json.loads((ROOT / 'ci' / 'releases.json').read_text())
  assert listed == [r['version'] for r in data['releases']]


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
