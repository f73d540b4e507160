# SPDX-License-Identifier: Apache-2.0
"""The program of JAX issue 29162: a shard_map that closes over a weight.

Stock JAX 0.6.1 aborts on it, later releases raise NotImplementedError.
"""
import os
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '2')

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((2,), ('i',), axis_types=(AxisType.Explicit,))
jax.set_mesh(mesh)

w = jax.device_put(jnp.array([1., 2., 3.]), P())
x = jax.device_put(jnp.arange(12.).reshape(4, 3), P('i'))


@jax.shard_map(in_specs=P('i'), out_specs=P('i'))
def predict(x):  # x: f32[2,3], a shard of the data; w: f32[3], all of it
  return jnp.sum(w * x, axis=-1)


@jax.jit
@jax.grad
def gradient(w):  # with respect to the closed-over value
  f = jax.shard_map(lambda x: jnp.sum(w * x, axis=-1),
                    in_specs=P('i'), out_specs=P('i'))
  return jnp.sum(f(x) ** 2)


print('eager:   ', predict(x))
print('jit:     ', jax.jit(predict)(x))
print('gradient:', gradient(w))
