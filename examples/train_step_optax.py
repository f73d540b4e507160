# SPDX-License-Identifier: Apache-2.0
"""A training step whose shard_map closes over the parameters. Needs Optax.

Both axes of the mesh are manual in the shard_map: each device computes its
share of the hidden units on its share of the data.
"""
import os
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '4')

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
import numpy as np
import optax

mesh = jax.make_mesh((2, 2), ('data', 'model'),
                     axis_types=(AxisType.Explicit,) * 2,
                     devices=jax.devices()[:4])
jax.set_mesh(mesh)

k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
params = {
    'w1': jax.device_put(0.5 * jax.random.normal(k1, (8, 16)), P()),
    'w2': jax.device_put(0.5 * jax.random.normal(k2, (16, 1)), P())}
x = jax.random.normal(k3, (64, 8))
x, y = jax.device_put((x, jnp.sin(x[:, :1])), P('data'))
optimizer = optax.adam(0.02)


def shard_loss(params, x, y):  # x: f32[32,8], w1: f32[8,16], w2: f32[16,1]
  share = lambda w, axis: jax.lax.dynamic_slice_in_dim(
      w, 8 * jax.lax.axis_index('model'), 8, axis)
  h = jnp.tanh(x @ share(params['w1'], 1))
  error = jax.lax.psum(h @ share(params['w2'], 0), 'model') - y
  return jax.lax.pmean(jnp.mean(error**2), 'data')


def closure_loss(params, x, y):
  f = jax.shard_map(lambda x, y: shard_loss(params, x, y),
                    in_specs=P('data'), out_specs=P())
  return f(x, y)


argument_loss = jax.shard_map(
    shard_loss, in_specs=(P(), P('data'), P('data')), out_specs=P())


def train(loss, params):
  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  state, losses = optimizer.init(params), []
  for _ in range(101):
    params, state, value = step(params, state)
    losses.append(value.item())
  return params, losses


closure, losses = train(closure_loss, params)
argument, argument_losses = train(argument_loss, params)
assert losses[-1] < 0.1 * losses[0]
assert losses == argument_losses
jax.tree.map(np.testing.assert_array_equal, closure, argument)
assert jax.tree.map(jax.typeof, closure) == jax.tree.map(jax.typeof, argument)

for i in range(0, 101, 25):
  print(f'step {i:3}: loss {losses[i]:.4f}')
print('w1:', jax.typeof(closure['w1']))
print('Closure and argument form are equal.')
