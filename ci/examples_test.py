# SPDX-License-Identifier: Apache-2.0
"""Runs the examples with the JAX of this interpreter, which is to be patched.

Those that need a package which is not installed are skipped.
"""

import importlib.util
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

_EXAMPLES = Path(__file__).resolve().parent.parent / 'examples'


@pytest.mark.parametrize('name', sorted(p.name for p in _EXAMPLES.glob('*.py')))
def test_example(name):
  text = (_EXAMPLES / name).read_text()
  for module in re.findall(r'^(?:import|from) (\w+)', text, re.M):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f'needs {module}')
  run = subprocess.run(
      [sys.executable, '-W', 'error', _EXAMPLES / name],
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, capture_output=True,
      text=True, check=False, timeout=600)
  assert run.returncode == 0, run.stderr
  assert run.stdout
