# SPDX-License-Identifier: Apache-2.0
"""The names of JAX 0.12 that the tests use, on older releases as well.

What a release lacks altogether is a feature that `require` skips tests by.
"""
import contextlib

import jax
import jaxlib
from jax import lax
from jax._src import array
from jax._src import config
from jax._src import core
from jax._src import pjit
from jax._src import shard_map
from jax.sharding import AxisType, PartitionSpec as P

RELEASE = f'JAX {jax.__version__}'
VERSION = jax.__version_info__

set_mesh = getattr(jax, 'set_mesh', None) or jax.sharding.use_mesh
reshard = getattr(jax, 'reshard', None) or pjit.reshard
auto_axes = getattr(jax.sharding, 'auto_axes', None) or pjit.auto_axes

# What error messages call `reshard`.
RESHARD = next(name for name, module in [
    ('jax.reshard', jax), ('jax.sharding.reshard', jax.sharding),
    ('jax.experimental.shard.reshard', pjit)] if hasattr(module, 'reshard'))

if hasattr(lax, 'pcast'):
  pcast = lax.pcast
else:
  def pcast(x, axis_name, *, to):
    assert to == 'varying'
    return lax.pvary(x, axis_name)

def partitions(spec):
  """The entries of a PartitionSpec, one for each dimension."""
  return getattr(spec, 'partitions', None) or tuple(spec)

def unreduced(name):
  try:
    return P(unreduced={name})
  except TypeError:  # JAX 0.6.1
    return P(unreduced=name)

def are_all_axes_explicit():
  mesh = jax.sharding.get_abstract_mesh()
  return bool(mesh.axis_types) and all(
      t == AxisType.Explicit for t in mesh.axis_types)

# Features, and what to say where they are lacking.
FEATURES = dict(
    eager_partial=(VERSION >= (0, 7),
                   'eager shard_map over some of the axes raises a'
                   ' NotImplementedError'),
    eager_concrete=(VERSION >= (0, 7),
                    'with check_vma=False eager shard_map fails to look for a'
                    ' concrete value in an argument on an Explicit mesh'),
    eager_debug_print=(VERSION >= (0, 7),
                       'debug.print of a value that does not vary fails in an'
                       ' eager shard_map'),
    eager_rbg=(VERSION >= (0, 7),
               'an eager shard_map takes no rbg key: an AssertionError'),
    interp=(VERSION >= (0, 7),
            'jnp.interp of a varying and an unvarying argument is an error'),
    vmap=(VERSION >= (0, 7),
          'its patches leave out what is about vmap: error texts, and closures'
          ' under spmd_axis_name'),
    fuzz=(VERSION >= (0, 7),
          'all_gather in a partially manual body aborts in XLA, and a gradient'
          ' under vmap of a partially manual program may fail'),
    spmd_unmapped=(VERSION >= (0, 10),
                   'with spmd_axis_name and check_vma=True an operation of a'
                   ' mapped and an unmapped value fails'),
    axis_types=(VERSION >= (0, 10),
                'a value keeps the axis types of its own mesh in the body, and'
                ' operations refuse it where those of the shard_map differ'),
    refs=(hasattr(jax, 'new_ref'), 'no jax.new_ref'),
    reduced=(hasattr(P(), 'reduced'), 'PartitionSpec has no reduced axes'),
    reduced_arguments=(
        VERSION >= (0, 7),
        'shard_map takes no argument that is reduced over a manual axis'),
    mat=(hasattr(core.ShapedArray, 'mat'),
         'the spec of a type tells the manual axes, too, over which it is'
         ' reduced'),
    simplified_jaxpr_constants=(
        hasattr(config, 'use_simplified_jaxpr_constants'),
        'no jax_use_simplified_jaxpr_constants'),
    eager_refs=(hasattr(shard_map, '_check_no_eager_ref_args'),
                'eager shard_map takes no Ref arguments'),
    mixed_mesh_types=(
        not (0, 9) <= VERSION < (0, 11, 1),
        'an argument of an eager shard_map on a mesh with Explicit and Auto'
        ' axes loses its sharding over the Explicit axes from its type'),
    eager_partial_no_vma=(
        VERSION >= (0, 12),
        'eager shard_map over some axes takes no arguments with'
        ' check_vma=False'),
    zero_size=(jaxlib.__version__ != '0.11.2',
               'jaxlib 0.11.2 crashes on zero-size arrays in a shard_map, also'
               ' those in an eager associative_scan'),
    array_reversed=(hasattr(array.ArrayImpl, '__reversed__'),
                    'jax.Array has no __reversed__: an array is indexed where a'
                    ' tracer is reversed'),
)

def has(feature):
  return FEATURES[feature][0]

def require(test, *features):
  """Skips a test, and says why, on a release that lacks a feature."""
  for feature in features:
    present, reason = FEATURES[feature]
    if not present:
      test.skipTest(f'{RELEASE}: {reason}')

@contextlib.contextmanager
def fault(test, feature):
  """Skips a test where the argument form fails for want of a feature."""
  try:
    yield
  except Exception:
    require(test, feature)
    raise
