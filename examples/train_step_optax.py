# SPDX-License-Identifier: Apache-2.0
"""A training step whose shard_map closes over the parameters. Needs Optax.

The mesh has two Explicit axes. The shard_map makes `data` manual; the
parameters, sharded over `model`, stay so in its body.
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
    'w1': jax.device_put(0.5 * jax.random.normal(k1, (8, 16)),
                         P(None, 'model')),
    'w2': jax.device_put(0.5 * jax.random.normal(k2, (16, 1)),
                         P('model', None))}
x = jax.random.normal(k3, (64, 8))
x, y = jax.device_put((x, jnp.sin(x[:, :1])), P('data'))
optimizer = optax.adam(0.02)


def shard_loss(params, x, y):  # x: f32[32,8], w1: f32[8,16@model]
  h = jnp.tanh(x @ params['w1'])
  error = jnp.matmul(h, params['w2'], out_sharding=P()) - y
  return jax.lax.pmean(jnp.mean(error**2), 'data')


def closure_loss(params, x, y):
  f = jax.shard_map(lambda x, y: shard_loss(params, x, y),
                    in_specs=P('data'), out_specs=P(), axis_names={'data'})
  return f(x, y)


argument_loss = jax.shard_map(
    shard_loss, in_specs=(P(), P('data'), P('data')), out_specs=P(),
    axis_names={'data'})


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
