# SPDX-License-Identifier: Apache-2.0
"""Metropolis chains, sharded over a mesh, whose sampler closes over its key."""
import os
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '2')

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import numpy as np

mesh = jax.make_mesh((2,), ('chains',), axis_types=(AxisType.Explicit,),
                     devices=jax.devices()[:2])
jax.set_mesh(mesh)

mean = jax.device_put(jnp.array([1., -2.]), P())
start = jax.device_put(jnp.zeros((64, 2)), P('chains'))


def log_density(x):
  return -0.5 * jnp.sum((x - mean)**2)


def walk(key, x):  # x: f32[32,2], the chains of one device
  def step(x, key):
    k1, k2 = jax.random.split(key)
    proposal = x + jax.random.normal(k1, x.shape)
    ratio = jax.vmap(log_density)(proposal) - jax.vmap(log_density)(x)
    accept = jnp.log(jax.random.uniform(k2, ratio.shape)) < ratio
    x = jnp.where(accept[:, None], proposal, x)
    return x, x

  key = jax.random.fold_in(key, jax.lax.axis_index('chains'))
  return jax.lax.scan(step, x, jax.random.split(key, 500))[1][100:]


@jax.jit
def closure(key, x):
  f = jax.shard_map(lambda x: walk(key, x), in_specs=P('chains'),
                    out_specs=P(None, 'chains'))
  return f(x)


@jax.jit
def argument(key, x):
  f = jax.shard_map(walk, in_specs=(P(), P('chains')),
                    out_specs=P(None, 'chains'))
  return f(key, x)


key = jax.random.key(0)
samples = closure(key, start)
np.testing.assert_array_equal(samples, argument(key, start))
assert jax.typeof(samples) == jax.typeof(argument(key, start))
samples = np.asarray(samples)
assert not np.array_equal(samples[:, :32], samples[:, 32:])

print('samples:', samples.shape)
print('mean:   ', samples.mean((0, 1)))
print('std:    ', samples.std((0, 1)))
print('Closure and argument form are equal.')
