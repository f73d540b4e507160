# SPDX-License-Identifier: Apache-2.0
"""Values on Explicit meshes closed over by `jax.shard_map`.

The rule: a function that closes over `w` is the same program as one that takes
`w` as an argument, with the spec that mentions none of the newly manual axes.
The argument form is the oracle of nearly every test here.
"""
import contextlib
from functools import partial
import importlib.util
import itertools as it
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import compat
import hypothesis
from hypothesis import strategies as st
import jax
from jax import export
from jax import lax
from jax import shard_map
from jax.experimental import checkify
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax._src import config
from jax._src import core
from jax._src import shard_map as shard_map_lib
from jax._src import test_util as jtu
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

config.parse_flags_with_absl()
jtu.request_cpu_devices(8)

E, A = AxisType.Explicit, AxisType.Auto

# Every body takes a weight w: f32[4], the same on all manual axes, and a shard
# x: f32[n, 4]; it returns an array whose leading axis is x's.
BODIES = dict(
    # an operand of a primitive
    mul=lambda w, x: x * w,
    only=lambda w, x: x + (jnp.sin(w) * 2. + w.sum()),
    many_uses=lambda w, x: sum((x * w for _ in range(5)), x) + w[0],
    dot=lambda w, x: x + (x @ w)[:, None],
    outer=lambda w, x: x + jnp.outer(w, w).sum(0),
    cast=lambda w, x: x + w.astype('bfloat16').astype('float32'),
    where=lambda w, x: jnp.where(w > 2., x, w),
    reshape=lambda w, x: x + w.reshape(2, 2).T.ravel(),
    broadcast=lambda w, x: x + jnp.broadcast_to(w, (3, 4)).sum(0),
    concatenate=lambda w, x: x + jnp.concatenate([w, w])[2:6],
    stack=lambda w, x: x + jnp.stack([w, w]).sum(0),
    sort=lambda w, x: x + jnp.sort(-w),
    cumsum=lambda w, x: x + jnp.cumsum(w),
    argmax=lambda w, x: x + jnp.argmax(w),
    einsum=lambda w, x: x + jnp.einsum('i,j->i', w, w),
    convert=lambda w, x: x + jnp.asarray(w) + jnp.array(w),
    python=lambda w, x: x + w * 2 + 1. / w - w ** 2 + abs(-w),
    iterate=lambda w, x: x + sum(w),
    # returned as it is, or nearly
    identity=lambda w, x: jnp.broadcast_to(w, x.shape),
    # indexed and updated
    getitem=lambda w, x: x + w[1] + w[-1:] + w[jnp.array([0, 2])].sum(),
    at_set=lambda w, x: x + w.at[0].set(9.),
    at_add=lambda w, x: x + w.at[1:3].add(x[0, 0]),
    at_mul=lambda w, x: x + w.at[jnp.array([0, 3])].mul(2.),
    at_get=lambda w, x: x + w.at[7].get(mode='fill', fill_value=3.),
    dynamic_slice=lambda w, x: x + lax.dynamic_slice(w, (1,), (2,)).sum(),
    dynamic_update=lambda w, x: x + lax.dynamic_update_slice(w, x[0, :2], (1,)),
    dynamic_index=lambda w, x: x + lax.dynamic_index_in_dim(
        w, lax.axis_index('x') % 4, keepdims=False),
    take=lambda w, x: x + jnp.take(w, jnp.array([3, 1, 0, 0])),
    # jnp functions that look at the sharding of an operand
    zeros_like=lambda w, x: x + jnp.zeros_like(w),
    ones_like=lambda w, x: x + jnp.ones_like(w),
    full_like=lambda w, x: x + jnp.full_like(w, 2.),
    empty_like=lambda w, x: x + 0. * jnp.nan_to_num(jnp.empty_like(w)),
    lax_full_like=lambda w, x: x + lax.full_like(w, 2.),
    pad=lambda w, x: x + jnp.pad(w, (1, 1))[1:-1],
    linspace=lambda w, x: x + jnp.linspace(w, 2. * w, 3).sum(0),
    searchsorted=lambda w, x: x + jnp.searchsorted(w, w),
    interp=lambda w, x: x + jnp.interp(x, w, w * w),
    unique=lambda w, x: x + jnp.unique(w, size=4),
    roll=lambda w, x: x + jnp.roll(w, 1),
    tile=lambda w, x: x + jnp.tile(w, 2)[:4],
    repeat=lambda w, x: x + jnp.repeat(w, 2)[:4],
    softmax=lambda w, x: x + jax.nn.softmax(w),
    logsumexp=lambda w, x: x + jax.scipy.special.logsumexp(w),
    one_hot=lambda w, x: x + jax.nn.one_hot(w.astype(int), 4).sum(0),
    # control flow: carry, xs, operand, predicate, captured constant
    scan_carry=lambda w, x: x + lax.scan(
        lambda c, _: (2. * c, c.sum()), w, None, length=3)[0],
    scan_carry_updated=lambda w, x: x + lax.scan(
        lambda c, _: (c + w, None), w, None, length=3)[0],
    scan_xs=lambda w, x: lax.scan(lambda c, a: (c + a, a), x, w)[0],
    scan_const=lambda w, x: lax.scan(
        lambda c, _: (c * w, None), x, None, length=3)[0],
    map_xs=lambda w, x: x + lax.map(lambda a: 2. * a, w),
    fori_init=lambda w, x: x + lax.fori_loop(0, 3, lambda i, c: c + i, w),
    fori_const=lambda w, x: lax.fori_loop(0, 3, lambda i, c: c + w, x),
    while_carry=lambda w, x: x + lax.while_loop(
        lambda c: c.sum() < 50., lambda c: 2. * c, w),
    while_cond_const=lambda w, x: x + lax.while_loop(
        lambda c: c < w.sum(), lambda c: c + 1, 0),
    cond_pred=lambda w, x: lax.cond(
        w[0] > 0., lambda a: a + 1., lambda a: a, x),
    cond_operand=lambda w, x: x + lax.cond(
        w[0] > 0., lambda a: a + 1., lambda a: a, w),
    cond_const=lambda w, x: lax.cond(
        True, lambda a: a * w, lambda a: a * w + 1., x),
    cond_varying=lambda w, x: lax.cond(
        lax.axis_index('x') == 0, lambda: w + x[0], lambda: 2. * x[0])
        + jnp.zeros_like(x),
    switch=lambda w, x: lax.switch(
        w.astype(int)[0], [lambda a: a, lambda a: a * w], x),
    associative_scan=lambda w, x: x + lax.associative_scan(jnp.add, w),
    # an argument of jit and transforms called in the body, or captured by them
    jit_arg=lambda w, x: x + jax.jit(lambda v: v * 2.)(w),
    jit_const=lambda w, x: jax.jit(lambda a: a * w)(x),
    jit_nested=lambda w, x: jax.jit(lambda a: jax.jit(lambda v: v * w)(a))(x),
    checkpoint=lambda w, x: jax.checkpoint(lambda v, a: jnp.sin(v * a))(w, x),
    checkpoint_const=lambda w, x: jax.checkpoint(lambda a: jnp.sin(w * a))(x),
    vmap_arg=lambda w, x: x + jax.vmap(lambda v: v * 2.)(w),
    vmap_unmapped=lambda w, x: jax.vmap(lambda a, v: a * v, (0, None))(x, w),
    vmap_const=lambda w, x: jax.vmap(lambda a: a * w)(x),
    grad_arg=lambda w, x: x + jax.grad(lambda v: jnp.sin(v).sum())(w),
    grad_const=lambda w, x: jax.grad(lambda a: jnp.sin(a * w).sum())(x),
    grad_pcast=lambda w, x: x + jax.grad(lambda v: (v * x).sum())(
        compat.pcast(w, 'x', to='varying')),
    value_and_grad=lambda w, x: sum(
        jax.value_and_grad(lambda v: jnp.sin(v).sum())(w), x),
    jvp=lambda w, x: sum(jax.jvp(jnp.sin, (w,), (w,)), x),
    vjp=lambda w, x: x + jax.vjp(jnp.sin, w)[1](w)[0],
    linearize=lambda w, x: x + jax.linearize(jnp.sin, w)[1](w),
    hessian=lambda w, x: x + jax.hessian(lambda v: (v ** 3).sum())(w)[0],
    jacfwd=lambda w, x: x + jax.jacfwd(jnp.sin)(w)[0],
    custom_jvp=lambda w, x: jax.nn.relu(w - 2.) + x,
    custom_jvp_const=lambda w, x: jax.nn.silu(x * w),
    custom_vjp=lambda w, x: x + _cubed(w),
    custom_vjp_grad=lambda w, x: x + jax.grad(lambda v: _cubed(v).sum())(w),
    # the operand of a collective
    psum=lambda w, x: x + lax.psum(compat.pcast(w, 'x', to='varying'), 'x'),
    psum_const=lambda w, x: lax.psum(x * w, 'x') + x,
    all_gather=lambda w, x: x + lax.all_gather(
        compat.pcast(w, 'x', to='varying'), 'x').sum(0),
    ppermute=lambda w, x: x + lax.ppermute(
        compat.pcast(w, 'x', to='varying'), 'x', [(0, 0)]),
    all_to_all=lambda w, x: x + lax.all_to_all(
        compat.pcast(w, 'x', to='varying'), 'x', 0, 0, tiled=True),
    # handed to the host, or to a kernel
    debug_print=lambda w, x: (jax.debug.print('{}', w.sum()), x)[1],
    pure_callback=lambda w, x: x + jax.pure_callback(
        lambda w: np.sin(w), jax.typeof(w), w),
    io_callback=lambda w, x: x + io_callback(
        lambda w: np.sin(w), jax.typeof(w), w),
    pallas=lambda w, x: x + pl.pallas_call(
        _double, out_shape=jax.typeof(w), interpret=True)(w),
)

def _double(x_ref, y_ref):
  y_ref[...] = 2. * x_ref[...]

@jax.custom_vjp
def _cubed(v):
  return v ** 3
_cubed.defvjp(lambda v: (v ** 3, v), lambda v, g: (3. * v * v * g,))


def _mesh(shape, names, types):
  return jtu.create_mesh(shape, names, axis_types=types)

def _put(mesh, x, spec):
  return jax.device_put(x, NamedSharding(mesh, spec))

def _weight(mesh, spec=P()):
  return _put(mesh, jnp.arange(1., 5., dtype='float32'), spec)

def _batch(mesh, spec=P('x')):
  n = 2 * mesh.shape['x']
  x = jnp.arange(4. * n, dtype='float32').reshape(n, 4) / 8.
  return _put(mesh, x, spec)

def _closure_form(body, in_specs, **kw):
  return lambda w, x: shard_map(
      lambda x: body(w, x), in_specs=in_specs, **kw)(x)

def _argument_form(body, in_specs, w_spec=P(), **kw):
  return shard_map(body, in_specs=(w_spec, in_specs), **kw)


def _primitives(jaxpr):
  """The primitives of a jaxpr and of those inside of it, in order."""
  out = []
  for eqn in jaxpr.eqns:
    out.append(eqn.primitive.name)
    for sub in core.jaxprs_in_params(eqn.params):
      out.extend(_primitives(getattr(sub, 'jaxpr', sub)))
  return out

class SameProgramTestCase(jtu.JaxTestCase):

  def assert_same(self, got, want):
    """Equal values, bit for bit, and equal types."""
    got_leaves, got_tree = jax.tree.flatten(got)
    want_leaves, want_tree = jax.tree.flatten(want)
    self.assertEqual(got_tree, want_tree)
    for g, w in zip(got_leaves, want_leaves):
      self.assertEqual(jax.typeof(g), jax.typeof(w))
      if jax.dtypes.issubdtype(g.dtype, jax.dtypes.prng_key):
        g, w = jax.random.key_data(g), jax.random.key_data(w)
      np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


  def assert_same_outcome(self, run, closure_form, argument_form):
    """The same result or, where the argument form raises, the same error."""
    try:
      want = run(argument_form)
    except Exception as e:
      with self.assertRaises(type(e)):
        run(closure_form)
    else:
      self.assert_same(run(closure_form), want)


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class ClosureTest(SameProgramTestCase):

  @parameterized.named_parameters(
      {'testcase_name': f'_{name}_{mode}', 'name': name, 'mode': mode}
      for name in BODIES for mode in ['eager', 'jit', 'jit_const'])
  @jtu.with_explicit_mesh((2,), 'x')
  def test_body(self, mesh, name, mode):
    if name == 'interp':
      compat.require(self, 'interp')
    if (name, mode) == ('debug_print', 'eager'):
      compat.require(self, 'eager_debug_print')
    if (name, mode) == ('associative_scan', 'eager'):
      compat.require(self, 'zero_size')
    w, x = _weight(mesh), _batch(mesh)
    kw = dict(in_specs=P('x'), out_specs=P('x'))
    clos = _closure_form(BODIES[name], **kw)
    arg = _argument_form(BODIES[name], **kw)
    if mode == 'jit':
      clos, arg = jax.jit(clos), jax.jit(arg)
    elif mode == 'jit_const':
      clos = lambda w, x, f=clos: jax.jit(lambda x: f(w, x))(x)
      arg = jax.jit(arg)
    self.assert_same(clos(w, x), arg(w, x))
    if mode != 'eager':
      self.assertEqual(_primitives(jax.make_jaxpr(clos)(w, x)),
                       _primitives(jax.make_jaxpr(arg)(w, x)))


# Mesh shapes, and for each every way to make its axes Explicit, Auto or manual.
SHAPES = [(2,), (8,), (2, 2), (2, 4), (1, 2), (2, 1), (2, 2, 2)]

def _subsets(names):
  return [s for n in range(1, len(names) + 1)
          for s in it.combinations(names, n)]

MESHES = [
    (shape, types, manual)
    for shape in SHAPES
    for types in it.product([E, A], repeat=len(shape))
    for manual in _subsets('xyz'[:len(shape)])]


def _mesh_name(shape, types, manual):
  """For example 2E4A_x: a 2x4 mesh, 'x' Explicit and manual, 'y' Auto."""
  sizes = ''.join(f'{n}{"E" if t == E else "A"}' for n, t in zip(shape, types))
  return f'_{sizes}_{"".join(manual)}'


@jtu.with_config(jax_numpy_rank_promotion='allow')
class MeshTest(SameProgramTestCase):

  def _program(self, shape, types, manual, form, check_vma=True):
    """A program, its weight and its data on a mesh, partly sharded.

    The weight is sharded over the first axis that is neither manual nor Auto.
    """
    names = tuple('xyz'[:len(shape)])
    mesh = _mesh(shape, names, types)
    explicit = [n for n, t in zip(names, types) if t == E]
    rest = [n for n in explicit if n not in manual]
    w = _put(mesh, jnp.arange(1., 9.), P(rest[0] if rest else None))
    x_spec = P(tuple(n for n in manual if n in explicit) or None,
               rest[0] if rest else None)
    x = _put(mesh, jnp.arange(128.).reshape(16, 8) / 16., x_spec)
    body = lambda w, x: x * jnp.sin(w) + w.sum() + 2. * w
    f = form(body, in_specs=P(manual), out_specs=P(manual),
             axis_names=set(manual), check_vma=check_vma)
    return mesh, f, w, x

  @parameterized.named_parameters(
      (_mesh_name(*m) + ('' if check_vma else '_no_vma'), *m, check_vma)
      for m, check_vma in
      [(m, True) for m in MESHES] + [(m, False) for m in MESHES[::3]])
  def test_jit(self, shape, types, manual, check_vma):
    def forward(f, w, x):
      return f(w, x), jax.jvp(f, (w, x), (w, x))
    def gradient(f, w, x):
      return jax.grad(lambda w, x: jnp.sin(f(w, x)).sum(), (0, 1))(w, x)
    for transform in forward, gradient:
      def run(form):
        mesh, f, w, x = self._program(shape, types, manual, form, check_vma)
        with compat.set_mesh(mesh):
          return jax.jit(partial(transform, f))(w, x)
      self.assert_same_outcome(run, _closure_form, _argument_form)

  @parameterized.named_parameters(
      (_mesh_name(*m) + ('' if check_vma else '_no_vma'), *m, check_vma)
      for m, check_vma in
      [(m, True) for m in MESHES[::4]] + [(m, False) for m in MESHES[2::8]])
  def test_eager(self, shape, types, manual, check_vma):
    explicit = {n for n, t in zip('xyz', types) if t == E}
    if A in types and explicit - set(manual):
      compat.require(self, 'mixed_mesh_types')
    def run(form):
      mesh, f, w, x = self._program(shape, types, manual, form, check_vma)
      with compat.set_mesh(mesh):
        return f(w, x), jax.grad(lambda w: f(w, x).sum())(w)
    self.assert_same_outcome(run, _closure_form, _argument_form)

  @parameterized.named_parameters(
      (_mesh_name(*m), *m) for m in MESHES if m[0] in [(2,), (2, 2)])
  def test_mesh_as_argument(self, shape, types, manual):
    def run(form):
      mesh, _, w, x = self._program(shape, types, manual, form)
      f = form(lambda w, x: x * jnp.sin(w), mesh=mesh, in_specs=P(manual),
               out_specs=P(manual), axis_names=set(manual))
      return jax.jit(f)(w, x)
    self.assert_same_outcome(run, _closure_form, _argument_form)

  def test_abstract_mesh(self):
    mesh = _mesh((2, 2), ('x', 'y'), (E, E))
    w, x = _weight(mesh), _batch(mesh)
    amesh = jax.sharding.AbstractMesh((2, 2), ('x', 'y'), axis_types=(E, E))
    kw = dict(mesh=amesh, in_specs=P('x'), out_specs=P('x'))
    body = lambda w, x: x * w
    clos, arg = _closure_form(body, **kw), _argument_form(body, **kw)
    self.assert_same(clos(w, x), arg(w, x))
    self.assert_same(jax.jit(clos)(w, x), jax.jit(arg)(w, x))



def _loss(f):
  return lambda w, x: jnp.sin(f(w, x)).sum()

def _scan_around(f):
  def run(w, x):
    def step(carry, _):
      w, x = carry
      return (1.1 * w, f(w, x)), w.sum()
    return lax.scan(step, (w, x), None, length=3)
  return run

def _custom_vjp_around(f):
  @jax.custom_vjp
  def g(w, x):
    return f(w, x)
  def bwd(res, ct):
    w, x = res
    return 2. * jax.vjp(f, w, x)[1](ct)[0], ct
  g.defvjp(lambda w, x: (f(w, x), (w, x)), bwd)
  return jax.grad(_loss(g), (0, 1))

def _vmapped_pullback(f):
  def run(w, x):
    out, pullback = jax.vjp(f, w, x)
    return jax.vmap(pullback)(jnp.stack([out, 2. * out]))
  return run

# What may be around a shard_map: each takes f(w, x) to a function of w and x.
AROUND = dict(
    grad=lambda f: jax.grad(_loss(f), (0, 1)),
    grad_weight=lambda f: jax.grad(_loss(f)),
    value_and_grad=lambda f: jax.value_and_grad(_loss(f)),
    jvp=lambda f: lambda w, x: jax.jvp(f, (w, x), (3. * w, 2. * x)),
    jvp_weight=lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
    vjp=lambda f: lambda w, x: jax.vjp(f, w, x)[1](x),
    linearize=lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    linear_transpose=lambda f: lambda w, x: jax.linear_transpose(
        jax.linearize(f, w, x)[1], w, x)(x),
    hessian=lambda f: jax.hessian(_loss(f)),
    jacfwd=lambda f: jax.jacfwd(f),
    jacrev=lambda f: jax.jacrev(_loss(f)),
    jvp_of_grad=lambda f: lambda w, x: jax.jvp(
        jax.grad(_loss(f)), (w, x), (w, x)),
    grad_of_grad=lambda f: jax.grad(
        lambda w, x: jax.grad(_loss(f))(w, x).sum()),
    checkpoint=lambda f: jax.grad(_loss(jax.checkpoint(f)), (0, 1)),
    checkpoint_policy=lambda f: jax.grad(_loss(jax.checkpoint(
        f, policy=jax.checkpoint_policies.everything_saveable)), (0, 1)),
    vmap=lambda f: lambda w, x: jax.vmap(f)(
        jnp.stack([w, 2. * w]), jnp.stack([x, x + 1.])),
    vmap_weight=lambda f: lambda w, x: jax.vmap(f, (0, None), 1)(
        jnp.stack([w, 2. * w]), x),
    vmap_data=lambda f: lambda w, x: jax.vmap(f, (None, 1))(
        w, jnp.stack([x, x + 1.], 1)),
    vmap_of_grad=lambda f: lambda w, x: jax.vmap(
        jax.grad(_loss(f), (0, 1)), (0, None))(jnp.stack([w, 2. * w]), x),
    grad_of_vmap=lambda f: lambda w, x: jax.grad(lambda w: jnp.sin(jax.vmap(
        f, (0, None))(jnp.stack([w, w * w]), x)).sum())(w),
    vmapped_pullback=_vmapped_pullback,
    scan=_scan_around,
    grad_of_scan=lambda f: jax.grad(
        lambda w, x: _scan_around(f)(w, x)[0][1].sum(), (0, 1)),
    while_loop=lambda f: lambda w, x: lax.fori_loop(
        0, 3, lambda _, x: f(w, x), x),
    cond=lambda f: lambda w, x: lax.cond(
        w.sum() > 0., lambda w, x: f(w, x), lambda w, x: x, w, x),
    custom_vjp=_custom_vjp_around,
    jit=lambda f: jax.jit(lambda w, x: jax.jit(f)(2. * w, x) + w),
)


@jtu.with_config(jax_numpy_rank_promotion='allow')
class AroundTest(SameProgramTestCase):

  @parameterized.named_parameters(
      (f'_{name}_{mode}{"" if check_vma else "_no_vma"}', name, mode, check_vma)
      for name in AROUND for mode in ['eager', 'jit']
      for check_vma in [True, False])
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_transform(self, name, mode, check_vma, mesh):
    w, x = _weight(mesh), _batch(mesh)
    def run(form):
      f = form(lambda w, x: jnp.sin(x * w) + w ** 2, in_specs=P('x'),
               out_specs=P('x'), check_vma=check_vma)
      f = AROUND[name](f)
      return (jax.jit(f) if mode == 'jit' else f)(w, x)
    with compat.fault(self, 'eager_concrete'):
      want = run(_argument_form)
    self.assert_same(run(_closure_form), want)

  @parameterized.named_parameters((f'_{name}', name) for name in AROUND)
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_transform_partial_manual(self, name, mesh):
    w = _weight(mesh, P('y'))
    x = _batch(mesh, P('x', 'y'))
    def run(form):
      f = form(lambda w, x: jnp.sin(x * w) + w ** 2, in_specs=P('x'),
               out_specs=P('x'), axis_names={'x'})
      return jax.jit(AROUND[name](f))(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))

  @parameterized.named_parameters((f'_{name}', name) for name in AROUND)
  @jtu.with_explicit_mesh((2,), ('x',))
  @config.enable_checks(True)
  def test_transform_checked(self, name, mesh):
    w, x = _weight(mesh), _batch(mesh)
    def run(form):
      f = form(lambda w, x: jnp.sin(x * w) + w ** 2, in_specs=P('x'),
               out_specs=P('x'))
      f = AROUND[name](f)
      core.check_jaxpr(jax.make_jaxpr(f)(w, x).jaxpr)
      return jax.jit(f)(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_gradient_is_summed(self, mesh):
    # not against the argument form alone: the gradient of a value that is the
    # same on all shards is the sum of what each shard contributes
    w, x = _weight(mesh), _batch(mesh)
    f = _closure_form(lambda w, x: x * w, in_specs=P('x'), out_specs=P('x'))
    g = jax.jit(jax.grad(lambda w: f(w, x).sum()))(w)
    self.assertAllClose(g, np.asarray(x).sum(0))



class Model:
  """A value held in an attribute, as samplers and modules do."""

  def __init__(self, w):
    self.w = w

  def __call__(self, x):
    return x * self.w


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class ValueTest(SameProgramTestCase):

  def check(self, body, w, x, w_spec=P(), **kw):
    kw = dict(in_specs=P('x'), out_specs=P('x')) | kw
    arg = _argument_form(body, w_spec=w_spec, **kw)
    clos = _closure_form(body, **kw)
    want = arg(w, x)
    self.assert_same(clos(w, x), want)
    want = jax.jit(arg)(w, x)
    self.assert_same(jax.jit(clos)(w, x), want)
    self.assert_same(jax.jit(lambda x: clos(w, x))(x), want)

  @parameterized.parameters(
      'float32', 'bfloat16', 'float16', 'int8', 'int32', 'uint32', 'bool',
      'complex64')
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_dtype(self, dtype, mesh):
    w = _put(mesh, jnp.arange(4).astype(dtype), P())
    self.check(lambda w, x: x + (2 * w).astype(jnp.complex64).real.sum(),
               w, _batch(mesh))

  @parameterized.parameters((), (0,), (4, 0), (1,))
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_shape(self, *shape, mesh):
    if 0 in shape:
      compat.require(self, 'zero_size')
    w = _put(mesh, jnp.full(shape, 3.), P())
    self.check(lambda w, x: x + (2. * w).sum(), w, _batch(mesh))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_weak_type(self, mesh):
    w = jax.jit(lambda: 2. * 3.)()
    self.assertTrue(jax.typeof(w).weak_type)
    self.check(lambda w, x: x.astype('bfloat16') * w, w, _batch(mesh))

  @parameterized.parameters('threefry2x32', 'rbg', 'unsafe_rbg')
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_key(self, impl, mesh):
    def draw(key, x):
      key = jax.random.fold_in(key, lax.axis_index('x'))
      return x + jax.random.normal(key, x.shape)
    if impl != 'threefry2x32':
      compat.require(self, 'eager_rbg')
    key = _put(mesh, jax.random.key(0, impl=impl), P())
    self.check(draw, key, _batch(mesh))
    self.check(lambda key, x: x + jax.random.normal(key, (4,)), key,
               _batch(mesh))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_key_array(self, mesh):
    keys = _put(mesh, jax.random.split(jax.random.key(0), 3), P())
    def draw(keys, x):
      noise = jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys)
      return x + noise.sum(0)
    self.check(draw, keys, _batch(mesh))

  @config.legacy_prng_key('allow')
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_legacy_key(self, mesh):
    key = _put(mesh, jax.random.PRNGKey(0), P())
    self.check(lambda key, x: x + jax.random.uniform(key, (4,)), key,
               _batch(mesh))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_uncommitted(self, mesh):
    self.check(lambda w, x: x * w, jnp.arange(4.), _batch(mesh))

  def test_without_context_mesh(self):
    mesh = _mesh((2,), ('x',), (E,))
    self.check(lambda w, x: x * w, _weight(mesh), _batch(mesh), mesh=mesh)

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_value_made_before_the_mesh(self, mesh):
    with compat.set_mesh(_mesh((2,), ('x',), (E,))):
      x = _batch(mesh)
    for w in np.arange(4.), [1., 2., 3., 4.], 3., np.float32(3.):
      w = np.asarray(w, 'float32') if isinstance(w, list) else w
      self.check(lambda w, x: x * w, w, x)

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_pytree_and_attribute(self, mesh):
    w, x = _weight(mesh), _batch(mesh)
    kw = dict(in_specs=P('x'), out_specs=P('x'))
    params = {'scale': w, 'shift': (w + 1., [w * 2.])}
    body = lambda p, x: x * p['scale'] + p['shift'][0] - p['shift'][1][0]
    self.check(body, params, x)
    model = Model(w)
    self.assert_same(jax.jit(shard_map(model, **kw))(x),
                     jax.jit(_argument_form(lambda w, x: x * w, **kw))(w, x))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_passed_and_closed_over(self, mesh):
    w, x = _weight(mesh), _batch(mesh)
    kw = dict(in_specs=(P(), P('x')), out_specs=P('x'))
    clos = lambda w, x: shard_map(lambda v, x: x * w + v, **kw)(w, x)
    arg = shard_map(lambda u, v, x: x * u + v, in_specs=(P(), P(), P('x')),
                    out_specs=P('x'))
    self.assert_same(jax.jit(clos)(w, x), jax.jit(arg)(w, w, x))
    grad = lambda f: jax.jit(jax.grad(lambda w, *a: f(w, *a).sum()))
    self.assert_same(grad(clos)(w, x),
                     grad(lambda w, x: arg(w, w, x))(w, x))

  @parameterized.parameters(((2,), ('x',)), ((2, 2), ('x', 'y')))
  def test_returned_as_it_is(self, shape, names):
    if len(names) > 1:
      compat.require(self, 'eager_partial')
    mesh = _mesh(shape, names, (E,) * len(shape))
    with compat.set_mesh(mesh):
      w = _weight(mesh, P(names[1] if names[1:] else None))
      kw = dict(in_specs=P('x'), out_specs=(P(), P('x')), axis_names={'x'})
      self.check(lambda w, x: (w, {'x': x, 'w': w}['x']), w, _batch(mesh), **kw)

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_tracers(self, mesh):
    # values of the traces around the shard_map: jit's argument, a scan's
    # carry, a vmapped value, a primal with its tangent
    w, x = _weight(mesh), _batch(mesh)
    def run(form):
      f = form(lambda w, x: x * w, in_specs=P('x'), out_specs=P('x'),
               axis_names={'x'})
      def step(w, _):
        ws = jnp.stack([w, 2. * w])
        y = jax.vmap(lambda w: f(jnp.sin(w), x))(ws).sum(0)
        return w + jax.grad(lambda w: f(w, y).sum())(w) / 100., y
      return jax.jit(lambda w: lax.scan(step, w, None, length=2))(w)
    self.assert_same(run(_closure_form), run(_argument_form))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_converted_once_in_eager_mode(self, mesh):
    w, x = _weight(mesh), _batch(mesh)
    calls = []
    original = shard_map_lib._unmatch_spec
    def counted(*args, **kw):
      calls.extend(args)
      return original(*args, **kw)
    f = shard_map(lambda x: x * w + w - w, in_specs=P('x'), out_specs=P('x'))
    with mock.patch.object(shard_map_lib, '_unmatch_spec', counted):
      f(x)
    self.assertLen([c for c in calls if c is w], 1)


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class NestedTest(SameProgramTestCase):

  @parameterized.parameters('eager', 'jit')
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_values_of_every_level(self, mode, mesh):
    if mode == 'eager':
      compat.require(self, 'eager_partial')
    w = _weight(mesh)
    x = _batch(mesh, P('x', 'y'))
    kw_out = dict(in_specs=P('x'), out_specs=P('x'), axis_names={'x'})
    kw_in = dict(in_specs=P(None, 'y'), out_specs=P(None, 'y'),
                 axis_names={'y'})

    def closures(w, x):
      def outer(x):
        u, v = w * x.sum(), lax.axis_index('x')
        inner = lambda x: x * u.sum() + w.sum() + v
        return shard_map(inner, **kw_in)(x)
      return shard_map(outer, **kw_out)(x)

    def arguments(w, x):
      def outer(w, x):
        u, v = w * x.sum(), lax.axis_index('x')
        inner = lambda w, u, v, x: x * u.sum() + w.sum() + v
        specs = dict(kw_in, in_specs=(P(), P(), P(), P(None, 'y')))
        return shard_map(inner, **specs)(w, u, v, x)
      return shard_map(outer, **dict(kw_out, in_specs=(P(), P('x'))))(w, x)

    # In eager mode a nested shard_map takes no argument that is the same on
    # the outer's axis, so the oracle is under jit.
    if mode == 'jit':
      closures = jax.jit(closures)
    self.assertAllClose(closures(w, x), jax.jit(arguments)(w, x))

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_gradient(self, mesh):
    w, x = _weight(mesh), _batch(mesh, P('x', 'y'))
    kw_out = dict(in_specs=P('x'), out_specs=P('x'), axis_names={'x'})
    kw_in = dict(in_specs=P(None, 'y'), out_specs=P(None, 'y'),
                 axis_names={'y'})
    def run(form):  # a residual that varies over 'x' fails in either form
      outer = lambda w, x: form(lambda w, x: x + jnp.sin(w[:2]), **kw_in)(
          jnp.sin(w), x)
      f = form(outer, **kw_out)
      return jax.jit(jax.grad(lambda w, x: f(w, x).sum(), (0, 1)))(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))


class RefusedTest(jtu.JaxTestCase):
  """What may not be closed over is a ValueError, raised from Python."""

  def refused(self, f, x, *pieces, calls=()):
    for call in calls or (f, jax.jit(f), jax.grad(lambda x: f(x).sum())):
      with self.assertRaises(ValueError) as cm:
        call(x)
      for piece in pieces:
        self.assertIn(piece, str(cm.exception))
      # as on releases that could not close over any such value
      self.assertIsInstance(cm.exception, NotImplementedError)
    return cm.exception

  @jtu.with_explicit_mesh((2,), ('i',))
  def test_sharded_over_a_manual_axis(self, mesh):
    v = _put(mesh, jnp.ones((4, 3)), P('i'))
    def scaled(x):
      return x * v.sum()
    self.refused(
        shard_map(scaled, in_specs=P('i'), out_specs=P('i')), v,
        "'scaled'", 'f32[4@i,3]', "mesh axis 'i'",
        'must be the same on all of the manual axes',
        "in_specs=P('i', None)", f'{compat.RESHARD}(value, P(None, None))')

  @jtu.with_explicit_mesh((2,), ('i',))
  def test_the_remedies_work(self, mesh):
    v = _put(mesh, jnp.arange(12.).reshape(4, 3), P('i'))
    kw = dict(out_specs=P('i'))
    passed = shard_map(lambda x, v: x * v, in_specs=(P('i'), P('i', None)),
                       **kw)
    self.assertAllClose(passed(v, v), np.asarray(v) ** 2)
    v_ = compat.reshard(v, P(None, None))
    closed = shard_map(lambda x: x * v_.sum(), in_specs=P('i'), **kw)
    self.assertAllClose(closed(v), np.asarray(v) * np.asarray(v).sum())

  @jtu.with_explicit_mesh((2, 2, 2), ('i', 'j', 'k'))
  def test_specs_in_the_message(self, mesh):
    v = _put(mesh, jnp.ones((8, 8)), P(('i', 'j'), 'k'))
    x = _put(mesh, jnp.ones(8), P('i'))
    f = lambda **kw: shard_map(lambda x: x * v.sum(), in_specs=P('i'),
                               out_specs=P('i'), **kw)
    g = f(axis_names={'i'})
    calls = () if compat.has('eager_partial') else (jax.jit(g),)
    self.refused(g, x, 'f32[8@(i,j),8@k]', "mesh axis 'i'",
                 "in_specs=P('i', None)",
                 f"{compat.RESHARD}(value, P('j', 'k'))", calls=calls)
    self.refused(f(), x, "mesh axes 'i', 'j', 'k'",
                 "in_specs=P(('i', 'j'), 'k')",
                 f"{compat.RESHARD}(value, P(None, None))")
    # What is manual over 'j' alone has no type for P(('i', 'j')), so that no
    # in_specs would do.
    g = shard_map(lambda x: x * v.sum(), in_specs=P('j'), out_specs=P('j'),
                  axis_names={'j'})
    calls = () if compat.has('eager_partial') else (jax.jit(g),)
    y = _put(mesh, jnp.ones(8), P('j'))
    e = self.refused(g, y, "mesh axis 'j'", 'manual axes. Make it the same',
                     f"{compat.RESHARD}(value, P('i', 'k'))", calls=calls)
    self.assertNotIn('in_specs', str(e))

  @parameterized.parameters(
      lambda v, x: x + v[0], lambda v, x: x + v.at[0].set(1.)[0],
      lambda v, x: lax.scan(lambda c, _: (c, None), v, None, length=1)[0],
      lambda v, x: jax.jit(lambda v: v)(v), lambda v, x: v,
      lambda v, x: jnp.zeros_like(v), lambda v, x: lax.psum(v, 'i'),
      lambda v, x: jax.vmap(jnp.sin)(v), lambda v, x: jax.grad(jnp.sum)(v),
      lambda v, x: lax.cond(v[0, 0] > 0., lambda: x, lambda: x))
  @jtu.with_explicit_mesh((2,), ('i',))
  def test_every_place(self, body, mesh):
    v = _put(mesh, jnp.ones((4, 4)), P('i'))
    f = shard_map(lambda x: body(v, x), in_specs=P('i'), out_specs=P('i'))
    for call in f, jax.jit(f), jax.jit(lambda x: f(x)):
      with self.assertRaisesRegex(ValueError, r'closes over .* f32\[4@i,4\]'):
        call(v)

  @jtu.with_explicit_mesh((2,), ('i',))
  def test_unreduced(self, mesh):
    x = _put(mesh, jnp.ones(4), P('i'))
    @jax.jit
    def f(x):
      v = jnp.einsum('i,i->', x, x, out_sharding=compat.unreduced('i'))
      return shard_map(lambda x: x * v, in_specs=P('i'), out_specs=P('i'))(x)
    with self.assertRaisesRegex(
        ValueError,
        r"f32\[\]\{U:i\}, which is unreduced over .*'i'") as cm:
      f(x)
    spec, = re.findall(r'`in_specs=(.*?)`', str(cm.exception))
    self.assertEqual(eval(spec, dict(P=P)), compat.unreduced('i'))

  @parameterized.parameters(
      ((2,), ('k',)), ((4,), ('i',)), ((2, 2), ('i', 'k')))
  @jtu.with_explicit_mesh((2,), ('i',))
  def test_other_mesh(self, shape, names, mesh):
    other = _mesh(shape, names, (E,) * len(shape))
    v = _put(other, jnp.arange(3.), P())
    x = _put(mesh, jnp.ones((4, 3)), P('i'))
    f = shard_map(lambda x: x * v[0], in_specs=P('i'), out_specs=P('i'))
    self.refused(f, x, 'f32[3]', f"'{names[0]}': {shape[0]}", "'i': 2")

  @parameterized.parameters([slice(2, 4)], [slice(1, None, -1)])
  def test_other_devices(self, which):
    # the same names and sizes, so the same type: only arrays can tell
    mesh = _mesh((2,), ('i',), (E,))
    other = jax.sharding.Mesh(jax.devices()[:4][which], ('i',), axis_types=(E,))
    v = _put(other, jnp.arange(3.), P())
    x = _put(mesh, jnp.ones((4, 3)), P('i'))
    kw = dict(in_specs=P('i'), out_specs=P('i'))
    body = lambda x: x * v[0]
    self.refused(shard_map(body, mesh=mesh, **kw), x, 'f32[3]',
                 'devices [0, 1]')
    with compat.set_mesh(mesh):
      self.refused(shard_map(body, **kw), x, 'f32[3]', 'devices [0, 1]')

  @jtu.with_explicit_mesh((2,), ('i',))
  def test_traceback_ends_in_the_body(self, mesh):
    v = _put(mesh, jnp.ones((4, 3)), P('i'))
    def body(x):
      return x * v.sum()  # here
    for call in (shard_map(body, in_specs=P('i'), out_specs=P('i')),
                 jax.jit(shard_map(body, in_specs=P('i'), out_specs=P('i')))):
      try:
        with config.traceback_filtering('auto'):
          call(v)
      except ValueError as e:
        *_, frame = traceback.extract_tb(e.__traceback__)
      self.assertEqual((frame.filename, frame.name), (__file__, 'body'))

  @jtu.with_explicit_mesh((2, 2), ('i', 'j'))
  def test_the_inner_function_is_named(self, mesh):
    v = _put(mesh, jnp.ones((4, 4)), P('i', 'j'))
    def inner(x):
      return x * v.sum()
    def outer(x):
      return shard_map(inner, in_specs=P(None, 'j'), out_specs=P(None, 'j'),
                       axis_names={'j'})(x)
    f = shard_map(outer, in_specs=P('i'), out_specs=P('i'), axis_names={'i'})
    with self.assertRaisesRegex(ValueError, "'inner'"):
      jax.jit(f)(v)


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class ExecutionTest(SameProgramTestCase):
  """The ways to run a program, and the modes of JAX that change them."""

  BODIES = ['mul', 'identity', 'scan_const', 'jit_const', 'checkpoint_const']

  def check(self, body, w, x, w_spec=P(), **kw):
    kw = dict(in_specs=P('x'), out_specs=P('x')) | kw
    clos = _closure_form(body, **kw)
    arg = _argument_form(body, w_spec=w_spec, **kw)
    want = jax.jit(arg)(w, x)
    const = jax.jit(lambda x: clos(w, x))
    self.assert_same(jax.jit(clos)(w, x), want)
    self.assert_same(const(x), want)
    self.assert_same(jax.jit(clos).lower(w, x).compile()(w, x), want)
    self.assert_same(const.lower(x).compile()(x), want)
    if config.use_shardy_partitioner.value:  # else neither form is exported
      self.assert_same(self.exported(jax.jit(clos), w, x), want)
      self.assert_same(self.exported(const, x), want)

  def exported(self, f, *args):
    exp = export.export(f)(*args)
    # JAX does not serialize the shardings of results on Auto axes.
    if (importlib.util.find_spec('flatbuffers') and
        compat.are_all_axes_explicit()):
      exp = export.deserialize(exp.serialize())
    return exp.call(*args)

  @parameterized.product(name=BODIES, types=[(E, E), (E, A), (A, A)],
                         option=['', 'jax_use_simplified_jaxpr_constants',
                                 'gspmd'])
  def test_under_jit(self, name, types, option):
    if option == 'gspmd':
      context = config.use_shardy_partitioner(False)
    elif option:
      compat.require(self, 'simplified_jaxpr_constants')
      context = config.use_simplified_jaxpr_constants(True)
    else:
      context = contextlib.nullcontext()
    mesh = _mesh((2, 2), ('x', 'y'), types)
    with compat.set_mesh(mesh), context:
      w = _weight(mesh, P('y' if types[1] == E else None))
      x = _batch(mesh, P('x' if types[0] == E else None,
                         'y' if types[1] == E else None))
      self.check(BODIES[name], w, x, axis_names={'x'})

  @parameterized.parameters(BODIES)
  @jtu.with_explicit_mesh((2,), ('x',))
  def test_disable_jit(self, name, mesh):
    w, x = _weight(mesh), _batch(mesh)
    kw = dict(in_specs=P('x'), out_specs=P('x'))
    with jax.disable_jit():
      self.assert_same(_closure_form(BODIES[name], **kw)(w, x),
                       _argument_form(BODIES[name], **kw)(w, x))

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_same_hlo(self, mesh):
    # names of computations and metadata aside
    w, x = _weight(mesh, P('y')), _batch(mesh, P('x', 'y'))
    kw = dict(in_specs=P('x'), out_specs=P('x'), axis_names={'x'})
    body = lambda w, x: jnp.sin(x * w) + lax.psum(x, 'x') + w
    def hlo(form, transform):
      f = jax.jit(transform(form(body, **kw)))
      text = f.lower(w, x).compile().as_text()
      text = re.sub(r', metadata=\{[^}]*\}|^HloModule.*$', '', text, flags=re.M)
      return text.split('FileNames')[0]
    for transform in lambda f: f, AROUND['grad']:
      self.assertEqual(hlo(_closure_form, transform),
                       hlo(_argument_form, transform))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_second_call_is_cached(self, mesh):
    w, x = _weight(mesh), _batch(mesh)
    traces = []
    def body(x):
      traces.append(x)
      return x * w
    f = jax.jit(shard_map(body, in_specs=P('x'), out_specs=P('x')))
    self.assert_same(f(x), f(x))
    self.assertLen(traces, 1)

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_one_argument_for_many_uses(self, mesh):
    w, x = _weight(mesh), _batch(mesh)
    f = lambda w, x: shard_map(
        lambda x: x * w + jax.jit(lambda x: x - w)(x) + w.sum(),
        in_specs=P('x'), out_specs=P('x'))(x)
    eqn, = jax.make_jaxpr(f)(w, x).jaxpr.eqns
    self.assertLen(eqn.invars, 2)
    self.assertEqual(eqn.params['in_specs'], (P(), P('x')))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_no_constant_is_embedded(self, mesh):
    w = _put(mesh, jnp.arange(1000.), P())
    x = _put(mesh, jnp.ones((2, 1000)), P('x'))
    f = lambda w, x: shard_map(lambda x: x * w + jnp.zeros_like(w),
                               in_specs=P('x'), out_specs=P('x'))(x)
    text = jax.jit(f).lower(w, x).as_text()
    self.assertNotIn('dense<"0x', text)


@jtu.with_config(jax_numpy_rank_promotion='allow')
class RefTest(SameProgramTestCase):

  def setUp(self):
    super().setUp()
    compat.require(self, 'refs')

  def programs(self, body, **kw):
    kw = dict(in_specs=P('x'), out_specs=P('x')) | kw
    def closure(w, x):
      ref = jax.new_ref(w)
      return shard_map(lambda x: body(ref, x), **kw)(x), ref[...]
    def argument(w, x):
      ref = jax.new_ref(w)
      f = shard_map(body, **dict(kw, in_specs=(P(), P('x'))))
      return f(ref, x), ref[...]
    return closure, argument

  def read(ref, x):
    return x * ref[...]

  def write(ref, x):
    ref[...] = 2. * ref[...]
    ref[0] += 1.
    return x * ref[...]

  def loop(ref, x):
    def step(i, x):
      ref[i] = ref[i] * 2.
      return x + ref[i]
    return lax.fori_loop(0, 4, step, x)

  @parameterized.product(body=[read, write, loop], axis_names=[(), ('x',)],
                         check_vma=[True, False])
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_under_jit(self, mesh, body, axis_names, check_vma):
    w, x = _weight(mesh), _batch(mesh)
    closure, argument = self.programs(body, axis_names=set(axis_names),
                                      check_vma=check_vma)
    self.assert_same(jax.jit(closure)(w, x), jax.jit(argument)(w, x))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_eager(self, mesh):
    compat.require(self, 'eager_refs')
    # as for an argument
    for program in self.programs(lambda ref, x: x * ref[...]):
      with self.assertRaisesRegex(NotImplementedError, 'under `jax.jit`'):
        program(_weight(mesh), _batch(mesh))


@jtu.with_config(jax_numpy_rank_promotion='allow')
class ReducedTest(SameProgramTestCase):

  def setUp(self):
    super().setUp()
    compat.require(self, 'reduced')

  @parameterized.product(reduced=[('x',), ('y',), ('x', 'y')],
                         transform=['value', 'grad', 'jvp'],
                         check_vma=[True, False])
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_under_jit(self, mesh, reduced, transform, check_vma):
    w, x = _weight(mesh), _batch(mesh)
    spec = P(reduced=set(reduced))
    def run(form):
      def f(w, x):
        kw = {} if form is _closure_form else dict(w_spec=spec)
        f = form(lambda w, x: x * w, in_specs=P('x'), out_specs=P('x'),
                 check_vma=check_vma, **kw)
        return f(compat.reshard(w, spec), x)
      return jax.jit(AROUND.get(transform, lambda f: f)(f))(w, x)
    self.assert_same_outcome(run, _closure_form, _argument_form)

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_type_in_the_body(self, mesh):
    compat.require(self, 'reduced_arguments')
    seen = []
    def f(w, x):
      w = compat.reshard(w, P(reduced={'x'}))
      def body(x):
        seen.append(jax.typeof(w))
        return x * w
      return shard_map(body, in_specs=P('x'), out_specs=P('x'))(x)
    jax.jit(f)(_weight(mesh), _batch(mesh))
    if compat.has('mat'):
      self.assertEqual(seen[0].mat.reduced, {'x'})
      self.assertEqual(seen[0].sharding.spec.reduced, set())
    else:
      self.assertEqual(seen[0].sharding.spec.reduced, {'x'})


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class ConcreteArrayTest(SameProgramTestCase):
  """Places that treat an array in another way than a tracer.

  The closed-over array is concrete, and sharded over an axis that stays
  Explicit.
  """

  @parameterized.named_parameters(
      ('getitem', lambda w, x: x + w[0] + w[1:3].sum() + w[-1]),
      ('iterate', lambda w, x: x + sum(w)),
      ('reversed', lambda w, x: x + list(reversed(w))[0]),
      ('unpack', lambda w, x: x + (lambda a, *b: a - b[0])(*w)),
      ('psum', lambda w, x: x + lax.psum(w, 'x')[0]),
      ('pmean', lambda w, x: x + lax.pmean(w, 'x')[0]),
      ('zeros_like', lambda w, x: x + jnp.zeros_like(w)[0]),
      ('empty_like', lambda w, x: x + jnp.empty_like(w)[0] * 0.),
      ('at_get', lambda w, x: x + w.at[0].get()))
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_sharded(self, body, mesh):
    if self._testMethodName.endswith('_reversed'):
      compat.require(self, 'array_reversed')
    w = _put(mesh, jnp.arange(1., 17.).reshape(4, 4) / 7., P(None, 'y'))
    x = _batch(mesh, P('x', 'y'))
    kw = dict(in_specs=P('x'), out_specs=P('x'), axis_names={'x'})
    clos, arg = _closure_form(body, **kw), _argument_form(body, **kw)
    def run(form):
      return form(body, **kw)(w, x)
    self.assert_same_outcome(run, _closure_form, _argument_form)
    const = jax.jit(lambda x: clos(w, x))
    self.assert_same(const(x), jax.jit(arg)(w, x))
    self.assertEqual(_primitives(jax.make_jaxpr(const)(x)),
                     _primitives(jax.make_jaxpr(jax.jit(arg))(w, x)))

  @jtu.with_explicit_mesh((2,), ('x',))
  def test_iterate_over_what_is_refused(self, mesh):
    v = _put(mesh, jnp.arange(4.), P('x'))
    for body in (lambda x: x + sum(v), lambda x: x + list(reversed(v))[0],
                 lambda x: x + lax.psum(v, 'x').sum()):
      f = shard_map(body, in_specs=P('x'), out_specs=P('x'))
      for call in f, jax.jit(f):
        with self.assertRaisesRegex(ValueError, 'closes over'):
          call(_batch(mesh))

  @parameterized.parameters([(E,)], [(A,)])
  def test_iterate_over_keys(self, types):
    mesh = _mesh((2,), ('x',), types)
    with compat.set_mesh(mesh):
      keys = _put(mesh, jax.random.split(jax.random.key(0), 3), P())
      x = _batch(mesh, P('x' if types == (E,) else None))
      body = lambda keys, x: x + sum(jax.random.normal(k, (4,)) for k in keys)
      kw = dict(in_specs=P('x'), out_specs=P('x'))
      clos, arg = _closure_form(body, **kw), _argument_form(body, **kw)
      self.assert_same(clos(keys, x), arg(keys, x))
      self.assert_same(jax.jit(lambda x: clos(keys, x))(x),
                       jax.jit(arg)(keys, x))

  @parameterized.product(types=[(E,), (A,)], inside=[True, False])
  def test_checkify(self, types, inside):
    # https://github.com/jax-ml/jax/issues/40907
    mesh = _mesh((2,), ('x',), types)
    with compat.set_mesh(mesh):
      w, x = _weight(mesh), _batch(mesh, P('x' if types == (E,) else None))
      def f(w, x):
        def body(x):
          if inside:
            checkify.check(jnp.all(w > 0.), 'negative: {w0}', w0=w[0])
          return x * w
        if not inside:
          checkify.check(jnp.all(w > 0.), 'negative: {w0}', w0=w[0])
        return shard_map(body, in_specs=P('x'), out_specs=P('x'))(x)
      checked = jax.jit(checkify.checkify(f))
      error, y = checked(w, x)
      self.assertIsNone(error.get())
      self.assertAllClose(y, np.asarray(x) * np.asarray(w))
      self.assertIn('negative: -1.0', checked(-w, x)[0].get())

  @jtu.with_explicit_mesh((2,), ('x',))
  @config.enable_checks(True)
  def test_custom_jvp_rule_that_calls_jvp(self, mesh):
    # partial evaluation leaves the closed-over value in its environment
    w, x = _weight(mesh), _batch(mesh)
    def run(form):
      f = form(lambda w, x: x * jax.jit(jnp.sin)(w), in_specs=P('x'),
               out_specs=P('x'))
      g = jax.custom_jvp(f)
      g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
      return jax.jit(jax.grad(_loss(g), (0, 1)))(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))

  @parameterized.parameters(
      lambda w, x: x + compat.auto_axes(
          lambda v: 2. * v, axes='y', out_sharding=P('y'))(w),
      lambda w, x: compat.auto_axes(
          lambda x: 2. * x, axes='y', out_sharding=P(None, 'y'))(x) + w)
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  @config.enable_checks(True)
  def test_auto_axes_in_the_body(self, body, mesh):
    w, x = _weight(mesh, P('y')), _batch(mesh, P('x', 'y'))
    def run(form):
      f = form(body, in_specs=P('x'), out_specs=P('x'), axis_names={'x'})
      return jax.jit(f)(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))

  @parameterized.product(
      types=[((E, E), (E, A)), ((E, A), (E, E)), ((E, E), (A, E)),
             ((A, A), (E, E)), ((A, E), (A, A))],
      set_mesh=(True, False), check_vma=(True, False))
  @config.enable_checks(True)
  def test_value_on_a_mesh_of_other_axis_types(
      self, types, set_mesh, check_vma):
    compat.require(self, 'axis_types')
    mesh, other = (_mesh((2, 2), ('x', 'y'), t) for t in types)
    w = _put(other, jnp.arange(16.).reshape(4, 4) / 16., P())
    x = _put(mesh, jnp.arange(16.).reshape(4, 4) / 9., P('x'))
    ctx = jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext()
    def run(form):
      f = form(lambda w, x: jax.jit(jnp.matmul)(x, w) + jnp.sin(w).sum() * x,
               mesh=mesh, in_specs=P('x'), out_specs=P('x'), axis_names={'x'},
               check_vma=check_vma)
      eager = check_vma or compat.has('eager_partial_no_vma')
      with ctx:
        return (jax.jit(f)(w, x), jax.jit(lambda x: f(w, x))(x),
                f(w, x) if eager else None,
                jax.jit(jax.grad(_loss(f), 1))(w, x))
    self.assert_same(run(_closure_form), run(_argument_form))

  @parameterized.product(names=({'y'}, {'z'}), check_vma=(True, False))
  @jtu.with_explicit_mesh((2, 2, 2), ('x', 'y', 'z'))
  @config.enable_checks(True)
  def test_auto_axes_between_shard_maps(self, names, check_vma, mesh):
    compat.require(self, 'axis_types')
    w, x = _weight(mesh, P()), _batch(mesh, P('x'))
    kw = dict(out_specs=P('x'), check_vma=check_vma)
    def run(form):
      inner = form(lambda w, x: jnp.sin(w) * x, in_specs=P(), out_specs=P(),
                   axis_names=names, check_vma=check_vma)
      outer = form(lambda w, x: compat.auto_axes(
          lambda x: inner(w, x), axes='z', out_sharding=P())(x),
                   in_specs=P('x'), axis_names={'x'}, **kw)
      return jax.jit(outer)(w, x)
    self.assert_same(run(_closure_form), run(_argument_form))

  @parameterized.parameters(True, False)
  def test_sharding_constraint_with_the_outer_mesh(self, check_vma):
    mesh = _mesh((2, 2), ('x', 'y'), (A, A))
    x = jnp.arange(32.).reshape(4, 8)
    sharding = NamedSharding(mesh, P(None, 'y'))
    f = shard_map(lambda x: lax.with_sharding_constraint(x, sharding) * 2.,
                  mesh=mesh, in_specs=P('x'), out_specs=P('x'),
                  axis_names={'x'}, check_vma=check_vma)
    self.assertAllClose(jax.jit(f)(x), 2. * x)
    self.assertNotIn('reshard', _primitives(jax.make_jaxpr(f)(x)))



SEED = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ('i',), axis_types=(AxisType.Explicit,))
set_mesh = getattr(jax, 'set_mesh', None) or jax.sharding.use_mesh
with set_mesh(mesh):
  w = jax.device_put(jnp.arange(1., 4.), P())
  x = jax.device_put(jnp.arange(12.).reshape(4, 3), P('i'))
  f = jax.shard_map(lambda x: jnp.sum(w * x, axis=-1), in_specs=P('i'),
                    out_specs=P('i'))
  print(CALL)
"""


class SubprocessTest(jtu.JaxTestCase):
  """Programs that once took the process with them."""

  @parameterized.parameters(
      ('f(x)', '[ 8. 26. 44. 62.]'),
      ('jax.jit(f)(x)', '[ 8. 26. 44. 62.]'),
      ('jax.jit(jax.grad(lambda x: f(x).sum()))(x).sum(0)', '[ 4.  8. 12.]'))
  def test_issue_29162(self, call, want):
    env = dict(os.environ, JAX_NUM_CPU_DEVICES='2', JAX_PLATFORMS='cpu')
    out = subprocess.run([sys.executable, '-c', SEED.replace('CALL', call)],
                         env=env, capture_output=True, text=True)
    self.assertEqual(out.returncode, 0, out.stderr)
    self.assertEqual(out.stdout.strip(), want)

  @parameterized.parameters('f(x)', 'jax.jit(f)(x)')
  def test_stock(self, call):
    # what the patches are for: JAX_STOCK is an interpreter, or the top of a
    # source tree, of the same release without them
    stock = os.environ.get('JAX_STOCK')
    if not stock:
      self.skipTest('JAX_STOCK is not set')
    env = dict(os.environ, JAX_NUM_CPU_DEVICES='2', JAX_PLATFORMS='cpu')
    env.pop('PYTHONPATH', None)
    python = stock
    if os.path.isdir(stock):
      python, env['PYTHONPATH'] = sys.executable, stock
    seed = SEED + 'assert jax.__version__ == ' + repr(jax.__version__)
    out = subprocess.run([python, '-c', seed.replace('CALL', call)],
                         env=env, capture_output=True, text=True)
    if compat.VERSION < (0, 6, 2):
      self.assertEqual(out.returncode, -signal.SIGABRT, out.stderr)
      self.assertIn('Check failed: !IsManual()', out.stderr)
    else:
      self.assertEqual(out.returncode, 1, out.stderr)
      self.assertIn('NotImplementedError: Closing over', out.stderr)



# How many programs a run of the fuzzer draws, and from which seed.
FUZZ_EXAMPLES = int(os.environ.get('FUZZ_EXAMPLES', '25'))
FUZZ_SEED = int(os.environ.get('FUZZ_SEED', '0'))
FUZZ_SHARDS = 8


@st.composite
def fuzz_programs(draw):
  """A mesh, weights with legal and illegal specs, and a program of bodies."""
  shape = draw(st.sampled_from(
      [(2,), (4,), (2, 2), (2, 4), (1, 2), (2, 1), (2, 2, 2)]))
  names = tuple('xyz'[:len(shape)])
  types = tuple(draw(st.sampled_from([E, E, A])) for _ in shape)
  manual = draw(st.sampled_from([s for s in _subsets(names) if 'x' in s]))
  explicit = [n for n, t in zip(names, types) if t == E]
  specs = draw(st.lists(st.sampled_from([P(), P(), *map(P, explicit)]),
                        min_size=1, max_size=3))
  steps = draw(st.lists(
      st.tuples(st.sampled_from(sorted(BODIES)), st.sampled_from(range(3))),
      min_size=1, max_size=4))
  around = draw(st.sampled_from(['value', 'value', 'eager', *sorted(AROUND)]))
  # Weights that no step uses would be refused in the argument form alone.
  used = sorted({i % len(specs) for _, i in steps})
  steps = [(name, used.index(i % len(specs))) for name, i in steps]
  specs = [specs[i] for i in used]
  check_vma = draw(st.booleans())
  if ('cond_varying' in dict(steps) and
      around not in ('value', 'eager', 'jvp', 'jacfwd', 'vmap', 'scan')):
    # The transpose of a pcast is a psum, here in one branch of the cond only:
    # both forms wait for each other's devices for ever, on stock as well.
    check_vma = False
  return dict(shape=shape, names=names, types=types, manual=manual, specs=specs,
              steps=steps, around=around, check_vma=check_vma)


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class FuzzTest(SameProgramTestCase):

  def setUp(self):
    super().setUp()
    compat.require(self, 'fuzz')

  def outcome(self, form, shape, names, types, manual, specs, steps, around,
              check_vma):
    mesh = _mesh(shape, names, types)
    explicit = [n for n, t in zip(names, types) if t == E]
    rows = tuple(n for n in manual if n in explicit) or None
    with compat.set_mesh(mesh):
      ws = [_put(mesh, jnp.arange(1. + i, 5. + i), s)
            for i, s in enumerate(specs)]
      x = _put(mesh, jnp.arange(64., dtype='float32').reshape(16, 4) / 64.,
               P(rows))
      def body(ws, x):
        for name, i in steps:
          x = BODIES[name](ws[i], x)
        return x
      f = form(body, in_specs=P(manual), out_specs=P(manual),
               axis_names=set(manual), check_vma=check_vma)
      g = lambda w, x: f([w, *ws[1:]], x)
      if around not in ('value', 'eager'):
        g = AROUND[around](g)
      if around != 'eager':
        g = jax.jit(g)
      try:
        return g(ws[0], x)
      except Exception as e:
        return e

  def check(self, program):
    got = self.outcome(_closure_form, **program)
    legal = [s for s in program['specs']
             if not set(compat.partitions(s)) & set(program['manual'])]
    if legal != program['specs']:
      if not isinstance(got, ValueError):  # Then a step before it is wrong.
        specs = [s if s in legal else P() for s in program['specs']]
        want = self.outcome(_argument_form, **dict(program, specs=specs))
        self.assertIsInstance(got, Exception)
        self.assertIs(type(got), type(want), str(got))
      return
    want = self.outcome(_argument_form, **program)
    if not isinstance(want, Exception):
      if isinstance(got, Exception):
        raise got
      jax.tree.map(lambda a, b: self.assertEqual(jax.typeof(a), jax.typeof(b)),
                   got, want)
      self.assertAllClose(got, want, rtol=1e-5, atol=1e-5)
    else:
      self.assertIsInstance(got, Exception, str(want))
      # An AssertionError is JAX's own failure to say what is wrong.
      if not isinstance(want, AssertionError):
        kinds = ValueError if isinstance(want, ValueError) else type(want)
        self.assertIsInstance(got, kinds, str(want))

  @parameterized.parameters(range(FUZZ_SHARDS))
  def test_programs(self, shard):
    @hypothesis.seed(FUZZ_SHARDS * FUZZ_SEED + shard)
    @hypothesis.settings(
        max_examples=FUZZ_EXAMPLES, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
    @hypothesis.given(fuzz_programs())
    def run(program):
      self.check(program)
    run()



PROCESS = """
import sys
import jax
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{sys.argv[1]}', 2, int(sys.argv[2]))
import numpy as np
from jax import lax, shard_map
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ('x',), axis_types=(AxisType.Explicit,))
(getattr(jax, 'set_mesh', None) or jax.sharding.set_mesh)(mesh)

def put(a, spec):
  return jax.make_array_from_callback(
      a.shape, NamedSharding(mesh, spec), lambda i: a[i])

w = put(np.arange(1., 5., dtype='float32'), P())
x = put(np.arange(32., dtype='float32').reshape(8, 4), P('x'))
assert not w.is_fully_addressable
kw = dict(in_specs=P('x'), out_specs=P('x'))
body = lambda w, x: x * w + lax.psum(x.sum(), 'x')
clos = lambda w, x: shard_map(lambda x: body(w, x), **kw)(x)
arg = shard_map(body, **dict(kw, in_specs=(P(), P('x'))))
loss = lambda f: lambda w, x: (f(w, x) ** 2).sum()

def same(a, b):
  assert jax.typeof(a) == jax.typeof(b)
  for s, t in zip(a.addressable_shards, b.addressable_shards):
    np.testing.assert_array_equal(s.data, t.data)

want = jax.jit(arg)(w, x)
same(clos(w, x), arg(w, x))
same(jax.jit(clos)(w, x), want)
same(jax.jit(lambda x: clos(w, x))(x), want)
same(jax.jit(jax.grad(loss(clos)))(w, x), jax.jit(jax.grad(loss(arg)))(w, x))
try:
  jax.jit(shard_map(lambda y: y * x.sum(), **kw))(x)
except ValueError as e:
  assert 'f32[8@x,4]' in str(e)
else:
  raise AssertionError('not refused')
print('done')
"""


class TwoProcessTest(jtu.JaxTestCase):

  def test_not_fully_addressable(self):
    if not jtu.test_device_matches(['cpu']):
      self.skipTest('starts CPU processes')
    with socket.socket() as s:
      s.bind(('127.0.0.1', 0))
      port = str(s.getsockname()[1])
    env = dict(os.environ, JAX_NUM_CPU_DEVICES='2', JAX_PLATFORMS='cpu')
    processes = [
        subprocess.Popen([sys.executable, '-c', PROCESS, port, str(i)], env=env,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         text=True) for i in range(2)]
    try:
      outs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
      for p in processes:
        p.kill()
    for p, out in zip(processes, outs):
      self.assertEqual(p.returncode, 0, out)
      self.assertIn('done', out)



if __name__ == '__main__':
  absltest.main(testLoader=jtu.JaxTestLoader())
