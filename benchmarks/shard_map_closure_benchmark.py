# SPDX-License-Identifier: Apache-2.0
"""What closing over values on an Explicit mesh costs in a jax.shard_map.

Sections, of which `--section` (repeatable) selects some:

  closure       closure form against argument form: tracing, lowering, compiled
                and eager runs; paired in this process
  programs      equations and optimized HLO of the two forms, without times
  stock         patched against stock JAX on programs that close over nothing;
                two processes take turns
  memory        lowering time and peak memory for one large closed-over value
  instructions  the first and the third section by instruction counts, which
                hardly depend on what else the machine does (needs valgrind)

A pair is two adjacent measurements of CPU time in alternating order. Figures
are ratios of the medians with their 95% interval (bootstrap over the pairs).

STOCK and PATCHED are a Python interpreter, or a directory to put before this
one's path (`ci/jax_patch.py open --stock DIR` makes one).
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import glob
import os
import re
import subprocess
import sys
import tempfile
import time

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '2')

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import numpy as np

_CLOSURE_BOUND = 1.05
_STOCK_BOUND = 1.01
_SIZES = [(1, 1), (1, 20), (1, 200), (50, 1), (50, 20), (50, 200), (500, 1)]
_CONTROL = (1, 20)  # Of this size the argument form is held against itself.
_MiB = 1 << 20

mesh = jax.make_mesh((2,), ('i',), axis_types=(AxisType.Explicit,),
                     devices=jax.devices()[:2])


# The two forms.


def _inputs(n):
  ws = [jax.device_put(np.full(8, 1 + i / 1e4, np.float32), P())
        for i in range(n)]
  return ws, jax.device_put(np.ones((4, 8), np.float32), P('i'))


def _body(uses):
  def body(ws, x):
    for _ in range(uses):
      for w in ws:
        x = x * w
    return x
  return body


def _closure(body):
  return lambda ws, x: jax.shard_map(
      lambda x: body(ws, x), in_specs=P('i'), out_specs=P('i'))(x)


def _argument(body):
  return jax.shard_map(body, in_specs=(P(), P('i')), out_specs=P('i'))


_FORMS = {'closure': _closure, 'argument': _argument}


# Each benchmark makes a function that does the work once, anew, and returns
# what `measure` says of the part that counts.


def _cpu_time(clock, f, *args):
  start = clock()
  f(*args)
  return clock() - start


def _trace(form, n, uses):
  """Values are arguments of the jit."""
  ws, x = _inputs(n)
  def run(measure):
    f = jax.jit(_FORMS[form](_body(uses)))
    return measure(time.thread_time, f.trace, ws, x)
  return run


def _trace_arrays(form, n, uses):
  """Values are arrays that the jit closes over."""
  ws, x = _inputs(n)
  def run(measure):
    f = _FORMS[form](_body(uses))
    return measure(time.thread_time, jax.jit(lambda x: f(ws, x)).trace, x)
  return run


def _lower(form, n, uses):
  ws, x = _inputs(n)
  def run(measure):
    traced = jax.jit(_FORMS[form](_body(uses))).trace(ws, x)
    return measure(time.thread_time, traced.lower)
  return run


def _lower_arrays(form, n, uses):
  ws, x = _inputs(n)
  def run(measure):
    f = _FORMS[form](_body(uses))
    traced = jax.jit(lambda x: f(ws, x)).trace(x)
    return measure(time.thread_time, traced.lower)
  return run


def _compiled(form, n, uses):
  ws, x = _inputs(n)
  f = jax.jit(_FORMS[form](_body(uses))).lower(ws, x).compile()
  def calls():
    for _ in range(20):
      jax.block_until_ready(f(ws, x))
  return lambda measure: measure(time.process_time, calls)


def _eager(form, n, uses):
  ws, x = _inputs(n)
  f = _FORMS[form](_body(uses))
  def call():
    jax.block_until_ready(f(ws, x))
  return lambda measure: measure(time.process_time, call)


_CLOSURE_BENCHMARKS = {
    'trace': _trace,
    'trace, arrays': _trace_arrays,
    'lowering': _lower,
    'lowering, arrays': _lower_arrays,
    'compiled run': _compiled,
    'eager run': _eager,
}


# Programs that close over nothing.


def _equations(n):
  def f(x, y):
    for _ in range(n // 4):
      x = jnp.sin(x) + y
      y = x * y - 1.
    return x + y
  return f


def _trace_2000():
  x = np.ones(8, np.float32)
  def run(measure):
    f = _equations(2000)
    return measure(time.thread_time, jax.jit(f).trace, x, x)
  return run


def _trace_grad():
  x = np.ones(8, np.float32)
  def run(measure):
    f = _equations(400)
    g = jax.jit(jax.grad(lambda x, y: jnp.sum(f(x, y))))
    return measure(time.thread_time, g.trace, x, x)
  return run


def _trace_vmap():
  x = np.ones((3, 8), np.float32)
  def run(measure):
    f = _equations(800)
    return measure(time.thread_time, jax.jit(jax.vmap(f)).trace, x, x)
  return run


def _trace_shard_map():
  _, x = _inputs(0)
  def run(measure):
    f = _equations(2000)
    f = jax.jit(jax.shard_map(f, in_specs=P('i'), out_specs=P('i')))
    return measure(time.thread_time, f.trace, x, x)
  return run


def _eager_shard_map():
  _, x = _inputs(0)
  f = jax.shard_map(_equations(40), in_specs=P('i'), out_specs=P('i'))
  def call():
    jax.block_until_ready(f(x, x))
  return lambda measure: measure(time.process_time, call)


def _calls(n, f, *args):
  """Measures n calls."""
  def calls():
    for _ in range(n):
      f(*args)
  return lambda measure: measure(time.thread_time, calls)


def _eager_add():
  x = jnp.ones(8)
  return _calls(1000, lambda: x + x)


def _eager_bind():
  x = jnp.ones(8)
  return _calls(1000, lax.add, x, x)


def _typeof():
  return _calls(5000, jax.typeof, jnp.ones(8))


def _jit_100_args():
  xs = [jnp.ones(8)] * 100
  return _calls(100, jax.jit(lambda xs: xs[0]), xs)


_STOCK_BENCHMARKS = {
    'trace 2,000 equations': _trace_2000,
    'trace a gradient of 400': _trace_grad,
    'trace a vmap of 800': _trace_vmap,
    'trace a shard_map of 2,000': _trace_shard_map,
    'eager shard_map of 40': _eager_shard_map,
    'eager x + y': _eager_add,
    'eager lax.add(x, y)': _eager_bind,
    'typeof(x)': _typeof,
    'call a jit with 100 arguments': _jit_100_args,
}


# Ratios.


def _ratio(groups):
  """Patched over reference, of [(a, b), ...] for each pair of processes.

  The mean over the groups of the ratio of medians, and its 95% interval.
  """
  rng = np.random.default_rng(0)
  def estimate(groups):
    return np.exp(np.mean([np.log(np.median(a) / np.median(b))
                           for a, b in groups]))
  def resample(pairs):
    return pairs[:, rng.integers(pairs.shape[1], size=pairs.shape[1])]
  groups = [np.array(g).T for g in groups]
  samples = [estimate([resample(groups[i])
                       for i in rng.integers(len(groups), size=len(groups))])
             for _ in range(1000)]
  return estimate(groups), *np.percentile(samples, [2.5, 97.5])


def _pairs(a, b, seconds):
  """Calls a and b in turn; returns what they return."""
  a(), b(), a(), b()
  pairs = []
  end = time.monotonic() + seconds
  while time.monotonic() < end or len(pairs) < 6:
    pairs.append((a(), b()) if len(pairs) % 2 else (b(), a())[::-1])
  return pairs


def _once(run, measure=_cpu_time):
  gc.collect()
  gc.disable()
  try:
    return run(measure)
  finally:
    gc.enable()


def _head(*columns):
  print('\n| ' + ' | '.join(columns) + ' |\n|' + ' --- |' * len(columns),
        flush=True)


def _row(*cells):
  print('| ' + ' | '.join(map(str, cells)) + ' |', flush=True)


def _row_of_ratio(name, groups, bound):
  ratio, low, high = _ratio(groups)
  verdict = ('within' if high <= bound else 'above' if low > bound else
             'not resolved')
  _row(*name, f'{ratio:.3f}', f'{low:.3f} to {high:.3f}', f'{bound:.2f}',
       verdict, sum(map(len, groups)))


# Sections.


def _closure_section(args):
  _head('what', 'values x uses', 'closure / argument', '95%', 'bound',
        'verdict', 'pairs')
  for name, benchmark in _CLOSURE_BENCHMARKS.items():
    for n, uses in _SIZES:
      if n * uses > 1000 and name in ('compiled run', 'eager run'):
        continue
      closure = benchmark('closure', n, uses)
      argument = benchmark('argument', n, uses)
      if (n, uses) == _CONTROL:
        pairs = _pairs(lambda: _once(argument), lambda: _once(argument),
                       args.seconds)
        _row_of_ratio((name, 'argument / argument'), [pairs], _CLOSURE_BOUND)
      pairs = _pairs(lambda: _once(closure), lambda: _once(argument),
                     args.seconds)
      _row_of_ratio((name, f'{n} x {uses}'), [pairs], _CLOSURE_BOUND)


def _count(jaxpr):
  """The number of equations, inner ones included."""
  jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
  return sum(1 + sum(_count(p) for p in e.params.values()
                     if hasattr(p, 'jaxpr') or hasattr(p, 'eqns'))
             for e in jaxpr.eqns)


def _hlo(f, *args):
  """The optimized HLO without names and metadata."""
  text = jax.jit(f).lower(*args).compile().as_text()
  text = re.sub(r', (metadata|frontend_attributes)=\{[^{}]*\}', '', text)
  text = re.sub(r'^(HloModule) \S+', r'\1', text)
  text = re.sub(r'^(FileNames|FunctionNames|FileLocations|StackFrames)\n'
                r'(.+\n)*', '', text, flags=re.M)
  names = {}
  return re.sub(r'%[\w.\-]+', lambda m: names.setdefault(
      m[0], f'%{len(names)}'), text)


def _programs_section(args):
  del args
  _head('values x uses', 'program', 'equations: closure, argument',
        'optimized HLO')
  for n, uses in _SIZES:
    ws, x = _inputs(n)
    def grad(f):
      return jax.grad(lambda ws, x: jnp.sum(f(ws, x)), argnums=(0, 1))
    forms = [_FORMS[form](_body(uses)) for form in _FORMS]
    for name, transform in (('forward', lambda f: f), ('gradient', grad)):
      fs = [transform(f) for f in forms]
      counts = [_count(jax.make_jaxpr(f)(ws, x)) for f in fs]
      hlo = 'not compiled'
      if n * uses <= 1000:
        hlo = [_hlo(f, ws, x) for f in fs]
        hlo = 'equal' if hlo[0] == hlo[1] else 'DIFFERENT'
      _row(f'{n} x {uses}', name, f'{counts[0]}, {counts[1]}', hlo)


class _Worker:
  """Another process, of another JAX, that runs benchmarks one at a time."""

  def __init__(self, jax_path, *args, prefix=(), seed='random'):
    env = {**os.environ, 'PYTHONHASHSEED': str(seed)}
    python = jax_path
    if os.path.isdir(jax_path):
      python = sys.executable
      env['PYTHONPATH'] = os.path.abspath(jax_path)
    self._process = subprocess.Popen(
        [*prefix, python, __file__, *args], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

  def __call__(self, *request):
    self._process.stdin.write(repr(request) + '\n')
    self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if not answer:
      sys.exit('a process of the benchmark has failed')
    return ast.literal_eval(answer)

  def close(self):
    self._process.communicate()


def _work(measure):
  """Answers the requests of a _Worker."""
  benchmarks = {}
  for line in sys.stdin:
    name, *args = request = ast.literal_eval(line)
    if request not in benchmarks:
      make = {**_CLOSURE_BENCHMARKS, **_STOCK_BENCHMARKS, **_MEMORY}[name]
      benchmarks[request] = make(*args)
    print(repr(_once(benchmarks[request], measure)), flush=True)


def _stock_section(args):
  groups = {name: [] for name in _STOCK_BENCHMARKS}
  for seed in range(args.processes):
    patched = _Worker(args.patched, '--work', 'time', seed=seed)
    stock = _Worker(args.stock, '--work', 'time', seed=seed)
    for name in _STOCK_BENCHMARKS:
      groups[name].append(_pairs(lambda: patched(name), lambda: stock(name),
                                 args.seconds))
    patched.close(), stock.close()
  _head('what', 'patched / stock', '95%', 'bound', 'verdict', 'pairs')
  for name in _STOCK_BENCHMARKS:
    _row_of_ratio((name,), groups[name], _STOCK_BOUND)


_CALLGRIND = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""


def _instructions(directory):
  """A `measure` that counts instructions, under callgrind."""
  callgrind = ctypes.CDLL(f'{directory}/callgrind.so')
  def measure(clock, f, *args):
    del clock
    callgrind.start()
    f(*args)
    callgrind.stop()
    dump = max(glob.glob(f'{directory}/{os.getpid()}.*'), key=os.path.getmtime)
    with open(dump) as file:
      count = int(re.search(r'^totals: (\d+)', file.read(), re.M)[1])
    os.remove(dump)
    return count
  return measure


def _instructions_section(args):
  with tempfile.TemporaryDirectory() as d:
    with open(f'{d}/callgrind.c', 'w') as file:
      file.write(_CALLGRIND)
    subprocess.run(['cc', '-shared', '-fPIC', '-o', f'{d}/callgrind.so',
                    f'{d}/callgrind.c'], check=True)
    def worker(jax_path):
      return _Worker(jax_path, '--work', d, seed=0, prefix=[
          'valgrind', '-q', '--tool=callgrind', '--instr-atstart=no',
          f'--callgrind-out-file={d}/%p'])
    def count(worker, *request):
      return np.median([worker(*request) for _ in range(4)][1:])

    patched = worker(args.patched)
    if args.stock:
      stock = worker(args.stock)
      _head('what', 'patched / stock, instructions', 'bound')
      for name in _STOCK_BENCHMARKS:
        ratio = count(patched, name) / count(stock, name)
        _row(name, f'{ratio:.4f}', f'{_STOCK_BOUND:.2f}')
      stock.close()
    _head('what', 'values x uses', 'closure / argument, instructions', 'bound')
    for name in _CLOSURE_BENCHMARKS:
      for n, uses in _SIZES:
        if n * uses <= 1000:
          ratio = (count(patched, name, 'closure', n, uses) /
                   count(patched, name, 'argument', n, uses))
          _row(name, f'{n} x {uses}', f'{ratio:.4f}', f'{_CLOSURE_BOUND:.2f}')
    patched.close()


# One large value.


def _constant_bytes(module):
  """The size of the constants embedded in a lowered module."""
  return sum(
      int(np.prod([int(i) for i in shape.split('x') if i])) * 4
      for shape in re.findall(
          r'stablehlo\.constant .*: tensor<((?:\d+x)*)f32>',
          str(module.operation.get_asm(large_elements_limit=8))))


def _memory(form, mebibytes):
  w = jax.device_put(np.ones((mebibytes * 256, 1024), np.float32), P())
  _, x = _inputs(0)
  def body(w, x):
    return x + jnp.sum(w)
  if form == 'closure, no shard_map':
    f = body
  else:
    f = _FORMS[form](body)
  def run(measure):
    del measure
    lowered = jax.jit(lambda x: f(w, x))
    with open('/proc/self/clear_refs', 'w') as file:
      file.write('5')  # Resets the peak.
    before = _status('VmRSS')
    start = time.process_time()
    lowered = lowered.lower(x)
    seconds = time.process_time() - start
    peak = _status('VmHWM') - before
    return seconds, peak / 1024, _constant_bytes(lowered.compiler_ir()) / _MiB
  return run


def _status(name):
  with open('/proc/self/status') as file:
    return int(re.search(rf'^{name}:\s+(\d+) kB', file.read(), re.M)[1])


_MEMORY = {'memory': _memory}


def _memory_section(args):
  _head('closed-over value', 'what', 'lowering / argument form\'s',
        'peak memory', 'constants in the module')
  for mebibytes in (1, 1024):
    cases = [('argument form', args.patched, 'argument'),
             ('closure form', args.patched, 'closure')]
    if args.stock:
      cases += [('argument form, stock', args.stock, 'argument'),
                ('closure of a jit without shard_map, stock', args.stock,
                 'closure, no shard_map')]
    base = None
    for name, jax_path, form in cases:
      worker = _Worker(jax_path, '--work', 'time')
      answers = [worker('memory', form, mebibytes)
                 for _ in range(20 if mebibytes == 1 else 4)]
      worker.close()
      seconds, _, constants = np.min(answers[1:], axis=0)
      peak = max(peak for _, peak, _ in answers)
      base = base or seconds
      _row(f'{mebibytes} MiB', name, f'{seconds / base:.2f}',
           f'{peak:.1f} MiB', f'{constants:.0f} MiB')


_SECTIONS = {
    'programs': _programs_section,
    'closure': _closure_section,
    'stock': _stock_section,
    'memory': _memory_section,
    'instructions': _instructions_section,
}


def main():
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--section', action='append', choices=_SECTIONS)
  parser.add_argument('--stock')
  parser.add_argument('--patched', default=os.environ.get('PYTHONPATH') or
                      sys.executable, help='default: the JAX of this process')
  parser.add_argument('--seconds', type=float, default=10,
                      help='for each figure (default: 10)')
  parser.add_argument('--processes', type=int, default=4,
                      help='pairs of processes for `stock` (default: 4)')
  parser.add_argument('--work', help=argparse.SUPPRESS)
  args = parser.parse_args()
  jax.set_mesh(mesh)
  if args.work:
    _work(_cpu_time if args.work == 'time' else _instructions(args.work))
    return
  for name in args.section or _SECTIONS:
    if name == 'stock' and not args.stock:
      print(f'\n{name}: skipped, as there is no --stock')
      continue
    print(f'\n{name}')
    _SECTIONS[name](args)


if __name__ == '__main__':
  main()
