# SPDX-License-Identifier: Apache-2.0
"""`jax.vmap` of `jax.shard_map` over mesh axes.

vmap over a dimension that is sharded on an Explicit mesh axis, or vmap with
`spmd_axis_name`, takes that axis for itself. `VmapErrorTest` holds the programs
that use it nevertheless: their errors must speak of vmap and say what to write.
`VmapResultTest` holds the programs that must work: the oracle is the form that
passes every value to the shard_map as an argument, or the unsharded program.
"""
from functools import partial
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import compat
import jax
from jax import lax
from jax import shard_map
from jax._src import config
from jax._src import core
from jax._src import test_util as jtu
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax.numpy as jnp
import numpy as np

config.parse_flags_with_absl()
jtu.request_cpu_devices(8)

IN_SPECS = 'vmapped away explicit mesh axis cannot appear in shard_map in_specs'
OUT_SPECS = ('vmapped away explicit mesh axis cannot appear in shard_map'
             ' out_specs')
SPMD_IN_SPECS = 'vmap spmd_axis_name cannot appear in shard_map in_specs'
SPMD_OUT_SPECS = 'vmap spmd_axis_name cannot appear in shard_map out_specs'
AXIS_NAMES = 'jax.shard_map requires axis_names='
UNMAPPED = ('Unmapped values passed to vmap cannot be sharded along the mesh'
            ' axis')
INCONSISTENT = ('Mapped away dimension of inputs passed to vmap should be'
                ' sharded the same')
ONLY_ONE = ('Only one of spmd_axis_name or arrays sharded on `Explicit` mesh'
            ' axis type is allowed')
UNBOUND = 'Found an unbound axis name: x.'
SPMD_COLLECTIVE = ('Collectives in a vmapped function cannot be over the mesh'
                   ' axes in vmap spmd_axis_name')
CLOSES_OVER = 'closes over an unmapped value of type f32[4@x]'
CLOSES_OVER_UNREDUCED = 'closes over an unmapped value of type f32[4]{U:x}'
MAPPED_X = "vmap maps over the mesh axis 'x' (mapped size 4)"


def _put(x, spec):
  return jax.device_put(x, spec)

def _data():
  return _put(jnp.arange(16.).reshape(4, 4) / 8., P('x', 'y'))

def _weight(spec=P('x')):
  return _put(jnp.arange(1., 5.), spec)

def _unreduced():
  return compat.reshard(_weight(P(None)), P(None, unreduced={'x'}))

def _custom_vjp(f):
  g = jax.custom_vjp(f)
  g.defvjp(lambda x: (f(x), None), lambda _, ct: (ct,))
  return g

# Ways to reach a function f: f32[4@y] -> f32[4@y] under a vmap over 'x'.
WAYS = dict(
    vmap=jax.vmap,
    jit_vmap=lambda f: jax.jit(jax.vmap(f)),
    vmap_jit=lambda f: jax.vmap(jax.jit(f)),
    vmap_vmap=lambda f: lambda x: jax.vmap(jax.vmap(f))(x[:, None])[:, 0],
    vmap_of_unsharded=lambda f: lambda x: jax.vmap(
        jax.vmap(f), in_axes=1, out_axes=1)(x[:, None])[:, 0],
    vmap_checkpoint=lambda f: jax.vmap(jax.checkpoint(f)),
    vmap_grad=lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())),
    grad_vmap=lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    vmap_scan=lambda f: jax.vmap(
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
    scan_vmap=lambda f: lambda x: lax.scan(
        lambda c, _: (jax.vmap(f)(c), None), x, None, length=2)[0],
    vmap_cond=lambda f: jax.vmap(lambda x: lax.cond(True, f, f, x)),
    vmap_custom_vjp=lambda f: jax.vmap(_custom_vjp(f)),
    grad_vmap_custom_vjp=lambda f: jax.grad(
        lambda x: jax.vmap(_custom_vjp(f))(x).sum()),
    vmap_jvp=lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (x,))[1]),
    vmap_linearize=lambda f: jax.vmap(lambda x: jax.linearize(f, x)[1](x)),
    vmap_vjp=lambda f: jax.vmap(lambda x: jax.vjp(f, x)[1](x)[0]),
)

def _sm(f, in_specs, out_specs=P('y'), **kw):
  return shard_map(f, in_specs=in_specs, out_specs=out_specs, **kw)

def _second(a, b):
  return b

# Each with the error's first words and pieces of the rest of it.
PROGRAMS = dict(
    in_specs=(
        lambda: _sm(lambda a: a, P('x')), IN_SPECS,
        ["in_specs, for argument a, is P('x',): use P('y',) instead"]),
    in_specs_for_the_batch=(
        lambda: _sm(lambda a: a, P('x', 'y'), P('x', 'y')), IN_SPECS,
        ["in_specs, for argument a, is P('x', 'y'): use P('y',) instead"]),
    in_specs_and_out_specs=(
        lambda: _sm(lambda a: a, P('x'), P('x')), IN_SPECS,
        ["in_specs, for argument a, is P('x',): use P('y',) instead"]),
    in_specs_tuple_entry=(
        lambda: _sm(lambda a: a, P(('x', 'y'))), IN_SPECS,
        ["in_specs, for argument a, is P(('x', 'y'),): use P('y',) instead"]),
    in_specs_second=(
        lambda: lambda x: _sm(_second, (P('y'), P('x')))(x, x), IN_SPECS,
        ["in_specs[1], for argument b, is P('x',): use P('y',) instead"]),
    in_specs_several=(
        lambda: lambda x: _sm(_second, (P('x'), P('x')))(x, x), IN_SPECS,
        ["in_specs[0], for argument a, is P('x',): use P('y',) instead",
         "in_specs[1], for argument b, is P('x',): use P('y',) instead"]),
    in_specs_prefix=(
        lambda: lambda x: _sm(lambda d: d['k'], P('x'))(dict(k=x)), IN_SPECS,
        ["in_specs, for argument d['k'], is P('x',): use P('y',) instead"]),
    in_specs_pytree=(
        lambda: lambda x: _sm(
            lambda d, t: t[1], (dict(k=P('x')), (P('y'), P('y'))))(
                dict(k=x), (x, x)), IN_SPECS,
        ["in_specs[0]['k'], for argument d['k'], is P('x',): use P('y',)"
         " instead"]),
    in_specs_varargs=(
        lambda: lambda x: _sm(lambda *xs: xs[1], (P('y'), P('x')))(x, x),
        IN_SPECS,
        ["in_specs[1], for argument xs[1], is P('x',): use P('y',) instead"]),
    in_specs_static=(
        lambda: lambda x: _sm(lambda s, a: a, (None, P('x')))('s', x), IN_SPECS,
        ["in_specs[1], for argument a, is P('x',): use P('y',) instead"]),
    in_specs_partial=(
        lambda: _sm(lambda a: a, P('x'), axis_names={'y'}), IN_SPECS,
        ["in_specs, for argument a, is P('x',): use P('y',) instead"]),
    in_specs_no_vma=(
        lambda: _sm(lambda a: a, P('x'), check_vma=False), IN_SPECS,
        ["in_specs, for argument a, is P('x',): use P('y',) instead"]),
    in_specs_nested=(
        lambda: _sm(lambda a: shard_map(lambda b: b, in_specs=P('x'),
                                        out_specs=P())(a), P('y')), IN_SPECS,
        ["in_specs, for argument b, is P('x',): use P() instead"]),
    out_specs=(
        lambda: _sm(lambda a: a, P('y'), P('x')), OUT_SPECS,
        ["out_specs is P('x',): use P() instead"]),
    out_specs_tuple_entry=(
        lambda: _sm(lambda a: a, P('y'), P(('x', 'y'))), OUT_SPECS,
        ["out_specs is P(('x', 'y'),): use P('y',) instead"]),
    out_specs_pytree=(
        lambda: lambda x: _sm(lambda a: dict(k=(a, a)), P('y'),
                              dict(k=(P('y'), P('x'))))(x)['k'][0], OUT_SPECS,
        ["out_specs['k'][1] is P('x',): use P() instead"]),
    in_specs_reduced=(
        lambda: _sm(lambda a: a, P('y', reduced={'x'})), IN_SPECS,
        ["P('y', reduced={'x'}): use P('y',) instead"]),
    out_specs_for_the_batch=(
        lambda: _sm(lambda a: a, P('y'), P('x', 'y')), OUT_SPECS,
        ["out_specs is P('x', 'y'): use P(None, 'y') instead, or P('y',) if"
         " that entry was for the dimension that vmap maps over"]),
    out_specs_unreduced=(
        lambda: _sm(lambda a: a, P('y'), P('y', unreduced={'x'})), OUT_SPECS,
        ["unreduced={'x'}", "use P('y',) instead"]),
    axis_names=(
        lambda: _sm(lambda a: a, P('y'), axis_names={'x', 'y'}), AXIS_NAMES,
        ["axis_names={'y'}"]),
    axis_names_only=(
        lambda: _sm(lambda a: a, P(), axis_names={'x'}), AXIS_NAMES,
        ["axis_names={'y'}"]),
    psum=(
        lambda: _sm(lambda a: lax.psum(a, 'x'), P('y')), UNBOUND,
        ['outside of vmap']),
    psum_both=(
        lambda: _sm(lambda a: a + lax.psum(a, ('x', 'y')), P('y')), UNBOUND,
        ['outside of vmap']),
    pmax=(
        lambda: _sm(lambda a: lax.pmax(a, 'x'), P('y')), UNBOUND,
        ['outside of vmap']),
    all_gather=(
        lambda: _sm(lambda a: lax.all_gather(a, 'x').sum(0), P('y')), UNBOUND,
        ['outside of vmap']),
    ppermute=(
        lambda: _sm(lambda a: lax.ppermute(a, 'x', [(0, 1)]), P('y')), UNBOUND,
        ['outside of vmap']),
    all_to_all=(
        lambda: _sm(lambda a: lax.all_to_all(a, 'x', 0, 0), P('y')), UNBOUND,
        ['outside of vmap']),
    axis_index=(
        lambda: _sm(lambda a: a * lax.axis_index('x'), P('y')), UNBOUND,
        ['outside of vmap']),
    axis_size=(
        lambda: _sm(lambda a: a * lax.axis_size('x'), P('y')), UNBOUND,
        ['outside of vmap']),
    pcast=(
        lambda: _sm(lambda a: compat.pcast(a, 'x', to='varying'), P('y')),
        UNBOUND,
        ['outside of vmap']),
    closed_over=(
        lambda: partial(lambda w, x: _sm(lambda a: a * w.sum(), P('y'))(x),
                        _weight()),
        '', [CLOSES_OVER, 'jax.reshard(value, P(None,))']),
    closed_over_nested=(
        lambda: partial(
            lambda w, x: _sm(lambda a: shard_map(
                lambda b: b * w.sum(), in_specs=P(), out_specs=P())(a),
                             P('y'))(x), _weight()),
        '', [CLOSES_OVER, 'jax.reshard(value, P(None,))']),
    closed_over_in_jit=(
        lambda: partial(lambda w, x: _sm(
            jax.jit(lambda a: a * w.sum()), P('y'))(x), _weight()),
        '', [CLOSES_OVER, 'jax.reshard(value, P(None,))']),
    closed_over_unreduced=(
        lambda: partial(lambda w, x: _sm(lambda a: a * w.sum(), P('y'))(x),
                        _unreduced()),
        '', [CLOSES_OVER_UNREDUCED, 'jax.reshard(value, P(None,))']),
    unmapped_unreduced=(
        lambda: partial(lambda w, x: _sm(
            lambda w, a: a * w[0], (P(), P('y')))(w, x), _unreduced()),
        UNMAPPED, ['f32[4]{U:x}, for argument w', 'jax.reshard(w, P(None,))']),
    unmapped=(
        lambda: partial(lambda w, x: _sm(
            lambda w, a: a * w[0], (P(), P('y')))(w, x), _weight()), UNMAPPED,
        ['f32[4@x], for argument w', 'jax.reshard(w, P(None,))']),
    unmapped_inferred=(
        lambda: partial(lambda w, x: shard_map(
            lambda w, a: a * w[0], out_specs=P('y'))(w, x), _weight()),
        UNMAPPED, ['f32[4@x], for argument w', 'jax.reshard(w, P(None,))']),
    unmapped_in_specs=(
        lambda: partial(lambda w, x: _sm(
            lambda w, a: a * w[0], (P('x'), P('y')))(w, x), _weight()),
        UNMAPPED, ['f32[4@x], for argument w', 'jax.reshard(w, P(None,))']),
)

# The same where spmd_axis_name is 'x' and the mesh axes are Auto.
SPMD_PROGRAMS = dict(
    in_specs=(
        lambda: _sm(lambda a: a, P('x')), SPMD_IN_SPECS,
        ["in_specs, for argument a, is P('x',): use P() instead"]),
    in_specs_for_the_batch=(
        lambda: _sm(lambda a: a, P('x', 'y')), SPMD_IN_SPECS,
        ["in_specs, for argument a, is P('x', 'y'): use P('y',) instead"]),
    in_specs_pytree=(
        lambda: lambda x: _sm(
            lambda d, a: a, (dict(k=P(('x', 'y'))), P('y')))(dict(k=x), x),
        SPMD_IN_SPECS,
        ["in_specs[0]['k'], for argument d['k'], is P(('x', 'y'),): use"
         " P('y',) instead"]),
    psum=(lambda: _sm(lambda a: lax.psum(a, 'x'), P('y')), SPMD_COLLECTIVE, []),
    psum_closed_over=(
        lambda: lambda x: _sm(lambda a: a + lax.psum(x, 'x'), P(), P())(x),
        SPMD_COLLECTIVE, []),
    pmax=(lambda: _sm(lambda a: lax.pmax(a, 'x'), P('y')), SPMD_COLLECTIVE, []),
    all_gather=(
        lambda: _sm(lambda a: lax.all_gather(a, 'x').sum(0), P('y')),
        SPMD_COLLECTIVE, []),
    ppermute=(
        lambda: _sm(lambda a: lax.ppermute(a, 'x', [(0, 1)]), P('y')),
        SPMD_COLLECTIVE, []),
    pcast=(
        lambda: _sm(lambda a: compat.pcast(a, 'x', to='varying'), P('y')),
        SPMD_COLLECTIVE, []),
    axis_index=(
        lambda: _sm(lambda a: a * lax.axis_index(('y', 'x')), P('y')),
        SPMD_COLLECTIVE, ['give vmap another spmd_axis_name']),
    out_specs=(
        lambda: _sm(lambda a: a, P('y'), P(('x', 'y')), check_vma=False),
        SPMD_OUT_SPECS, ["out_specs is P(('x', 'y'),): use P('y',) instead"]),
    out_specs_pytree=(
        lambda: lambda x: _sm(lambda a: (a, dict(k=a)), P('y'),
                              (P('y'), dict(k=P('x'))), check_vma=False)(x)[0],
        SPMD_OUT_SPECS, ["out_specs[1]['k'] is P('x',): use P() instead"]),
)
SPMD_WAYS = dict(
    vmap=lambda f, vmap: vmap(f),
    jit_vmap=lambda f, vmap: jax.jit(vmap(f)),
    vmap_jit=lambda f, vmap: vmap(jax.jit(f)),
    vmap_vmap=lambda f, vmap: lambda x: vmap(jax.vmap(f))(x[:, None])[:, 0],
    vmap_of_plain=lambda f, vmap: lambda x: jax.vmap(vmap(f))(x[None])[0],
    vmap_checkpoint=lambda f, vmap: vmap(jax.checkpoint(f)),
    vmap_grad=lambda f, vmap: vmap(jax.grad(lambda x: f(x).sum())),
    grad_vmap=lambda f, vmap: jax.grad(lambda x: vmap(f)(x).sum()),
    vmap_scan=lambda f, vmap: vmap(
        lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
    vmap_custom_vjp=lambda f, vmap: vmap(_custom_vjp(f)),
)

def _cases(programs, ways):
  return [dict(testcase_name=f'_{p}_{w}', program=p, way=w)
          for p in programs for w in ways]

def _modes(**cases):
  return [dict(kw, jit=jit, testcase_name=f'_{name}_{["eager", "jit"][jit]}')
          for name, kw in cases.items() for jit in (False, True)]


@jtu.with_config(jax_numpy_dtype_promotion='standard')
class VmapErrorTest(jtu.JaxTestCase):

  def setUp(self):
    super().setUp()
    compat.require(self, 'vmap')

  def assert_error(self, prefix, pieces, f, *args):
    with self.assertRaises(ValueError) as cm:
      f(*args)
    msg = str(cm.exception)
    self.assertStartsWith(msg, prefix)
    for piece in pieces:
      self.assertIn(piece, msg)
    self.assertNotIn('marked as manual', msg)

  @parameterized.named_parameters(_cases(PROGRAMS, WAYS))
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit(self, mesh, program, way):
    make, prefix, pieces = PROGRAMS[program]
    self.assert_error(prefix, [MAPPED_X, *pieces], WAYS[way](make()), _data())

  @parameterized.named_parameters(_cases(SPMD_PROGRAMS, SPMD_WAYS))
  def test_spmd(self, program, way):
    make, prefix, pieces = SPMD_PROGRAMS[program]
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    vmap = partial(jax.vmap, spmd_axis_name='x')
    with compat.set_mesh(mesh):
      f = SPMD_WAYS[way](make(), vmap)
      self.assert_error(prefix, [MAPPED_X, *pieces], f,
                        jnp.arange(16.).reshape(4, 4))

  @parameterized.named_parameters(_modes(
      in_specs=dict(
          in_spec=P('x'), prefix=IN_SPECS,
          piece="in_specs[0], for argument a, is P('x',): use P() instead"),
      in_specs_tuple_entry=dict(
          in_spec=P(('x', 'y')), prefix=IN_SPECS,
          piece="is P(('x', 'y'),): use P('y',) instead"),
      axis_names=dict(
          in_spec=P('y'), prefix=AXIS_NAMES, piece="axis_names={'y'}")))
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_late(self, mesh, jit, in_spec, prefix, piece):
    f = jaxpr_as_fun(jax.make_jaxpr(
        shard_map(lambda a: jnp.sin(a), in_specs=in_spec, out_specs=in_spec))(
            _put(jnp.arange(4.), in_spec)))
    g = lambda x: jax.vmap(lambda a: f(a)[0])(x)
    x = _put(jnp.arange(16.).reshape(4, 4),
             P('x', 'y' if in_spec == P('y') else None))
    with config.enable_checks(False):  # the types in the jaxpr name 'x'
      self.assert_error(prefix, [MAPPED_X, piece, 'traced outside of vmap'],
                        jax.jit(g) if jit else g, x)

  @parameterized.named_parameters(_modes(out_specs={}))
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_late_out_specs(self, mesh, jit):
    f = jaxpr_as_fun(jax.make_jaxpr(
        shard_map(lambda a: a * (1. + lax.axis_index('x')), in_specs=P('y'),
                  out_specs=P(('x', 'y'))))(_put(jnp.arange(4.), P('y'))))
    g = lambda x: jax.vmap(lambda a: f(a)[0])(x)
    self.assert_error(
        OUT_SPECS, [MAPPED_X, "is P(('x', 'y'),): use P('y',) instead"],
        jax.jit(g) if jit else g, _data())

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}', vmapped=vmapped) for name, vmapped in dict(
          pullback=lambda f, x: jax.vmap(jax.vjp(f, x)[1]),
          linearized=lambda f, x: jax.vmap(jax.linearize(f, x)[1]),
          jit_pullback=lambda f, x: jax.jit(jax.vmap(jax.vjp(f, x)[1])),
      ).items())
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_late_derivative(self, mesh, vmapped):
    f = shard_map(jnp.sin, in_specs=P('y'), out_specs=P('y'))
    g = vmapped(f, _put(jnp.arange(4.), P('y')))
    self.assert_error(AXIS_NAMES, [MAPPED_X, "axis_names={'y'}"], g, _data())

  @parameterized.named_parameters(_modes(spmd={}))
  def test_spmd_late(self, jit):
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    x = jnp.arange(16.).reshape(4, 4)
    f = shard_map(lambda a: a, mesh=mesh, in_specs=P('x'), out_specs=P('x'))
    g = shard_map(lambda a: a * (1. + lax.axis_index('x')), mesh=mesh,
                  in_specs=P('y'), out_specs=P(('x', 'y')))
    for h, prefix, piece in [
        (f, SPMD_IN_SPECS, "for argument a, is P('x',): use P() instead"),
        (g, SPMD_OUT_SPECS, "is P(('x', 'y'),): use P('y',) instead")]:
      h = jaxpr_as_fun(jax.make_jaxpr(h)(x[0]))
      h = jax.vmap(h, spmd_axis_name='x')
      with config.enable_checks(False):  # the types in the jaxpr name 'x'
        self.assert_error(prefix, [MAPPED_X, piece],
                          jax.jit(h) if jit else h, x)

  def test_spmd_suppressed(self):
    # The flag that turns the check off goes on doing so.
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    f = shard_map(lambda a, b: a + lax.all_gather(b, 'x', tiled=True),
                  mesh=mesh, in_specs=(P(None), P('x')), out_specs=P(None),
                  check_vma=False)
    f = jax.vmap(f, in_axes=(0, None), spmd_axis_name='x')
    x = jnp.arange(16.).reshape(4, 4)
    self.assert_error(SPMD_IN_SPECS,
                      ["in_specs[1], for argument b, is P('x',)"], f, x, x[0])
    with config.disable_vmap_shmap_error():
      f(x, x[0])

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}', wrap=wrap) for name, wrap in dict(
          eager=lambda f: f, jit=jax.jit, checkpoint=jax.checkpoint,
          grad=lambda f: jax.grad(lambda *xs: f(*xs).sum()),
          vmap=lambda f: jax.vmap(f, axis_size=2, in_axes=None),
      ).items())
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_passed_to_vmap(self, mesh, wrap):
    x, w = _data(), _weight()
    f = wrap(lambda x, w: jax.vmap(
        lambda a, d: a * d['k'][0], in_axes=(0, None))(x, dict(k=w)))
    self.assert_error(
        UNMAPPED, [MAPPED_X, "for argument d['k']", "in_axes: None",
                   "jax.reshard(d['k'], P(None,))"], f, x, w)
    f = wrap(lambda x, y: jax.vmap(lambda a, b: a * b, in_axes=(0, 1))(x, y))
    self.assert_error(
        INCONSISTENT,
        ['argument a of type f32[4@x,4@y], mapped along its dimension 0 (mapped'
         ' size 4)',
         'argument b of type f32[4,4@y], mapped along its dimension 1',
         "`jax.reshard(a, P('y', None))`", "`jax.reshard(b, P(None, 'x'))`"],
        f, x, compat.reshard(x, P(None, 'y')))
    f = wrap(lambda x: jax.vmap(lambda a: a, spmd_axis_name='y')(x))
    self.assert_error(
        ONLY_ONE,
        ["explicit_mesh_axis=('x',)", "spmd_axis_name=('y',)",
         'argument a of type f32[4@x,4@y], mapped along its dimension 0 (mapped'
         ' size 4)', "`jax.reshard(a, P('y', None))`"], f, x)

  @parameterized.named_parameters(_modes(spmd={}))
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_spmd_axis_is_explicit(self, mesh, jit):
    # Stock says that in_specs do not match, or fails in the lowering.
    f = jax.vmap(_sm(lambda a: a, P('y')), spmd_axis_name='x')
    self.assert_error(
        "vmap spmd_axis_name=('x',) names an `Explicit` mesh axis",
        [MAPPED_X, 'leave spmd_axis_name out'], jax.jit(f) if jit else f,
        compat.reshard(_data(), P(None, 'y')))
    f(_data())

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_unsharded_and_sharded(self, mesh):
    self.assert_error(
        INCONSISTENT, ["`jax.reshard(x, P(None, 'y'))`",
                       "`jax.reshard(y, P('x', None))`"],
        jax.vmap(lambda x, y: x + y), _data(), jnp.ones((4, 4)))

  @jtu.with_explicit_mesh((2, 2, 2), ('x', 'y', 'z'))
  def test_two_axes(self, mesh):
    x = _put(jnp.arange(64.).reshape(4, 8, 2), P('x', 'z', 'y'))
    f = shard_map(lambda a: a, in_specs=P('y'), out_specs=P(('z', 'y')))
    self.assert_error(
        OUT_SPECS,
        ["vmap maps over the mesh axes 'x' (mapped size 4), 'z' (mapped size 8)"
         ", which leaves 'y'"], jax.vmap(jax.vmap(f)), x)
    y = _put(jnp.arange(16.).reshape(8, 2), P(('x', 'z'), 'y'))
    f = shard_map(lambda a: a, in_specs=P(('z', 'x')), out_specs=P('y'))
    self.assert_error(
        IN_SPECS,
        ["vmap maps over the mesh axes 'x' (mapped size 8), 'z' (mapped size 8)"
         ", which leaves 'y'"], jax.vmap(f), y)
    # the message names all of the axes that are gone, the spec one of them
    self.assert_error(
        IN_SPECS,
        ["is P('z',): use P('y',) instead", "vmap maps over the mesh axes 'x'"
         " (mapped size 8), 'z' (mapped size 8), which leaves 'y'"],
        jax.vmap(_sm(jnp.sin, P('z'), P('y'))), y)

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_axis_of_no_mesh(self, mesh):
    # The axis that vmap maps over is not one to choose from.
    with self.assertRaisesRegex(
        ValueError, r"marked as manual \(frozenset\({'y'}\)\)"):
      jax.vmap(_sm(lambda a: a, P('z'), P('x')))(_data())

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_no_axis_left(self, mesh):
    x = compat.reshard(_data(), P(('x', 'y')))
    with self.assertRaisesRegex(
        ValueError, r"leaves no mesh axis for shard_map.*axis_names=set\(\)"):
      jax.vmap(_sm(jnp.sin, P(), P(), axis_names={'x'}))(x)
    self.assertAllClose(jax.vmap(_sm(jnp.sin, P(), P(), axis_names=set()))(x),
                        jnp.sin(x))

  @parameterized.named_parameters(_modes(spmd={}))
  def test_spmd_axis_size(self, jit):
    # It is no collective: the size of the mesh axis is what it was.
    compat.require(self, 'spmd_unmapped')
    with compat.set_mesh(jtu.create_mesh((2, 2), ('x', 'y'))):
      x = jnp.arange(16.).reshape(4, 4)
      f = jax.vmap(_sm(lambda a: a * lax.axis_size('x'), P('y')),
                   spmd_axis_name='x')
      self.assertAllClose((jax.jit(f) if jit else f)(x), 2. * x)

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_old_exception_types(self, mesh):
    # Code that catches what stock raised goes on working.
    f = jax.vmap(_sm(lambda a: lax.psum(a, 'x'), P('y')))
    with self.assertRaisesRegex(NameError, 'unbound axis name: x'):
      f(_data())
    with self.assertRaisesRegex(NotImplementedError, 'closes over'):
      jax.vmap(PROGRAMS['closed_over'][0]())(_data())

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_mended(self, mesh):
    # What the messages say to write works.
    x, w = _data(), compat.reshard(_weight(), P(None))
    f = _sm(lambda a: jnp.sin(a) + lax.psum(a.sum(), 'y') * w.sum(), P('y'),
            axis_names={'y'})
    out = jax.jit(jax.vmap(f))(x)
    expected = np.sin(x) + 10. * np.asarray(x).sum(1)[:, None]
    self.assertAllClose(out, expected, check_dtypes=False)
    self.assertEqual(out.sharding, NamedSharding(mesh, P('x', 'y')))

  def test_docs(self):
    path = pathlib.Path(__file__).parent.parent / 'docs' / 'vmap.md'
    if not path.exists():
      self.skipTest('docs/vmap.md is not beside the tests')
    blocks = re.findall(r'^```python\n(.*?)^```', path.read_text(), re.M | re.S)
    errors = [b for b in blocks if b.startswith('# ValueError: ')]
    self.assertGreater(len(errors), 8)
    self.assertLess(len(errors), len(blocks))
    scope = {}
    with compat.set_mesh(jtu.create_mesh((1,), 'x')):  # the page sets its own
      for block in blocks:
        if block in errors:
          text = block.splitlines()[0].removeprefix('# ValueError: ')
          with self.assertRaisesRegex(ValueError, re.escape(text)):
            exec(block, scope)
        else:
          exec(block, scope)


# Bodies take w: f32[] or f32[4], the same on all manual axes, and x: f32[4@y].
BODIES = dict(
    mul=lambda w, x: x * w.sum(),
    only=lambda w, x: jnp.broadcast_to(jnp.sin(w).sum(), x.shape),
    many_uses=lambda w, x: sum((x * w.sum() for _ in range(3)), x) + w.max(),
    psum=lambda w, x: lax.psum(x * w.sum(), 'y') + x,
    psum_w=lambda w, x: x + lax.psum(
        compat.pcast(w, 'y', to='varying'), 'y').sum(),
    all_gather=lambda w, x: x + (lax.all_gather(x, 'y') * w.sum()).sum(),
    axis_index=lambda w, x: x + lax.axis_index('y') * w.sum(),
    index=lambda w, x: x.at[0].set(w.ravel()[-1]),
    scan=lambda w, x: lax.scan(lambda c, a: (c + a, c), w.sum() + x[0], x)[1],
    scan_const=lambda w, x: lax.scan(
        lambda c, _: (c * w.sum(), None), x, None, length=2)[0],
    jit=lambda w, x: jax.jit(lambda a: a * w.sum())(x),
    vmap=lambda w, x: jax.vmap(lambda a: a * w.sum())(x),
    checkpoint=lambda w, x: jax.checkpoint(lambda v, a: jnp.sin(v * a))(
        w.sum(), x),
    grad=lambda w, x: jax.grad(lambda a: (jnp.sin(a) * w.sum()).sum())(x),
    custom_jvp=lambda w, x: jax.nn.relu(w.sum() - 2.) * x,
    custom_jvp_const=lambda w, x: jax.nn.silu(x * w.sum()),
    custom_vjp=lambda w, x: x + _custom_vjp(lambda v: v)(w).sum(),
)

def _closure_form(body, in_specs=P('y'), out_specs=P('y'), **kw):
  return lambda w, x: shard_map(lambda x: body(w, x), in_specs=in_specs,
                                out_specs=out_specs, **kw)(x)

def _argument_form(body, in_specs=P('y'), out_specs=P('y'), **kw):
  return lambda w, x: shard_map(body, in_specs=(P(), in_specs),
                                out_specs=out_specs, **kw)(w, x)

# How to map a function of w and x over the first one or two dimensions of both.
VMAPS = dict(
    one=lambda f, vmap_x, vmap_z: vmap_x(f),
    two=lambda f, vmap_x, vmap_z: vmap_x(vmap_z(f)),
    plain_in=lambda f, vmap_x, vmap_z: lambda w, x: vmap_x(jax.vmap(f))(
        w[:, None], x[:, None]),
    plain_out=lambda f, vmap_x, vmap_z: lambda w, x: jax.vmap(vmap_x(f))(
        w[None], x[None]),
    axes=lambda f, vmap_x, vmap_z: lambda w, x: vmap_x(
        f, in_axes=(0, 1), out_axes=1)(w, jnp.swapaxes(x, 0, 1)),
    two_axes=lambda f, vmap_x, vmap_z: lambda w, x: vmap_z(
        vmap_x(f), in_axes=(1, 1), out_axes=2)(w, x),
    unmapped_x=lambda f, vmap_x, vmap_z: lambda w, x: vmap_x(
        f, in_axes=(0, None))(w, x.sum(0)),
)

VMAPS_BODY = lambda w, x: jnp.sin(x) * w.sum() + lax.psum(x * w.max(), 'y')
VMAPS_ORACLE = lambda w, x: (
    jnp.sin(x) * w.sum() + jnp.tile((x * w.max()).reshape(2, -1).sum(0), 2))

def _primitives(jaxpr):
  """The primitives of a jaxpr and of those inside of it, in order."""
  out = []
  for eqn in jaxpr.eqns:
    out.append(eqn.primitive.name)
    for sub in core.jaxprs_in_params(eqn.params):
      out.extend(_primitives(getattr(sub, 'jaxpr', sub)))
  return out


@jtu.with_config(jax_numpy_rank_promotion='allow',
                 jax_numpy_dtype_promotion='standard')
class VmapResultTest(jtu.JaxTestCase):

  def setUp(self):
    super().setUp()
    compat.require(self, 'vmap')

  def assert_same(self, got, want):
    """Equal values, bit for bit, and equal types."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      self.assertEqual(jax.typeof(g), jax.typeof(w))
      np.testing.assert_array_equal(np.asarray(g), np.asarray(w))

  def check(self, vmapped, body, w, x, modes=('eager', 'jit', 'grad'), **kw):
    """The closure form does what the argument form does."""
    clos = vmapped(_closure_form(body, **kw))
    arg = vmapped(_argument_form(body, **kw))
    grad = lambda f: jax.jit(jax.grad(lambda w, x: jnp.sin(f(w, x)).sum(),
                                      (0, 1)))
    if 'eager' in modes:
      self.assert_same(clos(w, x), arg(w, x))
    if 'jit' in modes:
      self.assert_same(jax.jit(clos)(w, x), jax.jit(arg)(w, x))
      self.assertEqual(_primitives(jax.make_jaxpr(clos)(w, x)),
                       _primitives(jax.make_jaxpr(arg)(w, x)))
    if 'grad' in modes:
      self.assert_same(grad(clos)(w, x), grad(arg)(w, x))

  def explicit(self, w_ndim, two):
    lead = ('x', 'z') if two else ('x',)
    shape = (4, 2)[:len(lead)]
    w = jnp.arange(1., 1. + np.prod((*shape, 4))).reshape(*shape, 4) / 8.
    w = w if w_ndim else w[..., 0]
    x = jnp.arange(float(np.prod((*shape, 4)))).reshape(*shape, 4) / 8.
    return _put(w, P(*lead)), _put(x, P(*lead, 'y'))

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}', name=name) for name in BODIES)
  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_body(self, mesh, name):
    # Stock cannot differentiate an all_gather of an argument under this vmap.
    modes = ('jit',) if name == 'all_gather' else ('jit', 'grad')
    self.check(jax.vmap, BODIES[name], *self.explicit(1, False), modes)
    self.check(jax.vmap, BODIES[name], *self.explicit(0, False), ('eager',))

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}{kw_name}', name=name, kw=kw)
      for kw_name, kw in dict(
          _full={}, _no_vma=dict(check_vma=False), _y=dict(axis_names={'y'})
      ).items()
      for name in (VMAPS if not kw else ['one', 'two_axes']))
  @jtu.with_explicit_mesh((2, 2, 2), ('x', 'y', 'z'))
  def test_explicit_vmaps(self, mesh, name, kw):
    w, x = self.explicit(1, name.startswith('two'))
    vmapped = lambda f: VMAPS[name](f, jax.vmap, jax.vmap)
    if name == 'one' and kw.get('check_vma') is False:
      compat.require(self, 'eager_partial_no_vma')
    self.check(vmapped, VMAPS_BODY, w, x,
               ('eager',) if name == 'one' else ('jit', 'grad'), **kw)
    got = jax.jit(vmapped(_closure_form(VMAPS_BODY, **kw)))(w, x)
    want = vmapped(VMAPS_ORACLE)(np.asarray(w), np.asarray(x))
    self.assertAllClose(got, want)

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_value(self, mesh):
    w, x = self.explicit(0, False)
    f = jax.vmap(_closure_form(lambda w, x: lax.psum(x * w, 'y') + x))
    x_ = np.asarray(x)
    want = (x_ * w[:, None]).reshape(4, 2, 2).sum(1)
    want = np.concatenate([want, want], 1) + x_
    for g in f, jax.jit(f), jax.vmap(jax.jit(
        _closure_form(lambda w, x: lax.psum(x * w, 'y') + x))):
      self.assertAllClose(g(w, x), want)
      self.assertEqual(jax.typeof(g(w, x)), jax.typeof(x))

  @jtu.with_explicit_mesh((2, 2, 2), ('x', 'y', 'z'))
  def test_explicit_nested_shard_map(self, mesh):
    # The inner shard_map may not become manual over the mapped axis.
    w, x = _weight(), _put(jnp.arange(64.).reshape(4, 4, 4), P('x', 'y', 'z'))
    def f(w, a):
      def g(b):
        self.assertEqual(jax.typeof(w).shape, ())
        return shard_map(lambda c: jnp.sin(c) * w, in_specs=P(None, 'z'),
                         out_specs=P(None, 'z'))(b)
      return shard_map(g, in_specs=P('y'), out_specs=P('y'),
                       axis_names={'y'})(a)
    out = jax.jit(jax.vmap(f))(w, x)
    self.assertAllClose(out, np.sin(x) * np.asarray(w)[:, None, None])
    self.assertEqual(jax.typeof(out), jax.typeof(x))

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_all_axes_mapped(self, mesh):
    x = _data()
    f = jax.vmap(jax.vmap(shard_map(jnp.sin, in_specs=P(), out_specs=P())))
    for g in f, jax.jit(f):
      self.assertAllClose(g(x), np.sin(x))
      self.assertEqual(jax.typeof(g(x)), jax.typeof(x))

  @jtu.with_explicit_mesh((2, 2), ('x', 'y'))
  def test_explicit_function_used_twice(self, mesh):
    # The axes that are manual depend on the call, not on the first call.
    x = _data()
    f = shard_map(lambda a: a + lax.axis_index('y'), in_specs=P(None, 'y'),
                  out_specs=P(None, 'y'))
    g = shard_map(lambda a: a, out_specs=P('y'))
    f(compat.reshard(x, P(None, 'y')))
    jax.vmap(f)(x[:, None])
    jax.vmap(g)(x)
    with self.assertRaisesRegex(ValueError, 'require replication'):
      g(compat.reshard(x, P('y', 'x')))

  def test_spmd_axis_name_used_twice(self):
    # A call with an array sharded on an Explicit axis is no business of the
    # next call.
    f = jax.vmap(_closure_form(lambda w, x: x * w), spmd_axis_name='x')
    w, x = jnp.arange(4.), jnp.arange(16.).reshape(4, 4)
    explicit = jtu.create_mesh((2, 2), ('x', 'y'),
                               axis_types=(AxisType.Explicit,) * 2)
    auto = jtu.create_mesh((2, 2), ('x', 'y'))
    with compat.set_mesh(explicit):
      f(_put(w, P('x')), _put(x, P('x', 'y')))
    with compat.set_mesh(auto):
      eqn, = jax.make_jaxpr(f)(w, x).eqns
      self.assertIn(P('x', 'y'), eqn.params['in_specs'])

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}', name=name) for name in BODIES
      if name != 'scan_const')  # which stock cannot type as an argument, either
  @config.enable_checks(False)  # spmd_axis_name hides axes from the types
  def test_spmd_body(self, name):
    # https://github.com/jax-ml/jax/issues/17874
    if name in ('axis_index', 'custom_jvp', 'index', 'scan'):
      compat.require(self, 'spmd_unmapped')
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    w, x = jnp.arange(1., 5.), jnp.arange(16.).reshape(4, 4) / 8.
    vmap = partial(jax.vmap, spmd_axis_name='x')
    grad = () if name in ('checkpoint', 'scan') else ('grad',)
    with compat.set_mesh(mesh):
      self.check(vmap, BODIES[name], w, x, ('jit', *grad))
      got = jax.jit(vmap(_closure_form(BODIES[name])))(w, x)
      want = jax.jit(jax.vmap(_argument_form(BODIES[name])))(w, x)
    self.assertAllClose(got, want)

  @parameterized.named_parameters(
      dict(testcase_name=f'_{name}{kw_name}', name=name, kw=kw)
      for kw_name, kw in dict(
          _full={}, _y=dict(axis_names={'y'}), _no_vma=dict(check_vma=False),
          _xy=dict(axis_names={'x', 'y'}), _yz=dict(axis_names={'y', 'z'}),
      ).items()
      for name in (VMAPS if not kw else ['one', 'two', 'two_axes']))
  @config.enable_checks(False)  # spmd_axis_name hides axes from the types
  def test_spmd_vmaps(self, name, kw):
    mesh = jtu.create_mesh((2, 2, 2), ('x', 'y', 'z'))
    w = jnp.arange(1., 9.).reshape(4, 2)
    x = jnp.arange(32.).reshape(4, 2, 4) / 8.
    if not name.startswith('two'):
      w, x = w[:, 0], x[:, 0]
    vmap_x, vmap_z = (partial(jax.vmap, spmd_axis_name=n) for n in 'xz')
    vmapped = lambda f: VMAPS[name](f, vmap_x, vmap_z)
    with compat.set_mesh(mesh):
      self.check(vmapped, VMAPS_BODY, w, x, ('jit', 'grad')[:2 - len(kw)], **kw)
      got = jax.jit(vmapped(_closure_form(VMAPS_BODY, **kw)))(w, x)
    want = VMAPS[name](VMAPS_ORACLE, jax.vmap, jax.vmap)(w, x)
    self.assertAllClose(got, want)

  def test_spmd_eager(self):
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    w, x = jnp.arange(1., 5.), jnp.arange(16.).reshape(4, 4) / 8.
    vmap = partial(jax.vmap, spmd_axis_name='x')
    with compat.set_mesh(mesh):
      self.check(vmap, VMAPS_BODY, w, x, ('eager',))
      self.check(vmap, VMAPS_BODY, w, x, ('eager',), check_vma=False)
      got = vmap(_closure_form(VMAPS_BODY))(w, x)
    self.assertAllClose(got, jax.vmap(VMAPS_ORACLE)(w, x))

  def test_spmd_pair(self):
    mesh = jtu.create_mesh((2, 2, 2), ('x', 'y', 'z'))
    w, x = jnp.arange(1., 9.), jnp.arange(32.).reshape(8, 4) / 8.
    vmap = partial(jax.vmap, spmd_axis_name=('z', 'x'))
    with compat.set_mesh(mesh):
      self.check(vmap, VMAPS_BODY, w, x, ('jit', 'grad'))

  def test_spmd_closed_over_only(self):
    compat.require(self, 'spmd_unmapped')
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    w = jnp.arange(4.)
    f = jax.vmap(lambda w: shard_map(lambda: w * 2., mesh=mesh, in_specs=(),
                                     out_specs=P())(), spmd_axis_name='x')
    self.assertAllClose(f(w), 2. * w)
    self.assertAllClose(jax.jit(f)(w), 2. * w)

  def test_spmd_axis_of_size_one(self):
    mesh = jtu.create_mesh((1, 2), ('x', 'y'))
    w, x = jnp.arange(1., 5.), jnp.arange(16.).reshape(4, 4) / 8.
    with compat.set_mesh(mesh):
      self.check(partial(jax.vmap, spmd_axis_name='x'), BODIES['psum'], w, x,
                 ('jit', 'grad'))

  def test_spmd_same_hlo(self):
    mesh = jtu.create_mesh((2, 2), ('x', 'y'))
    w, x = jnp.arange(1., 5.), jnp.arange(16.).reshape(4, 4) / 8.
    vmap = partial(jax.vmap, spmd_axis_name='x')
    hlo = []
    with compat.set_mesh(mesh):
      for form in _closure_form, _argument_form:
        f = vmap(form(BODIES['psum']))
        def run(w, x):
          return jax.grad(lambda w, x: f(w, x).sum(), (0, 1))(w, x)
        txt = jax.jit(run).lower(w, x).compile().as_text()
        hlo.append(re.findall(r' = \S+ ([a-z0-9-]+)\(', txt))
    self.assertEqual(hlo[0], hlo[1])


if __name__ == '__main__':
  absltest.main(testLoader=jtu.JaxTestLoader())
