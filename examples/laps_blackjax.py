# SPDX-License-Identifier: Apache-2.0
"""BlackJAX's LAPS sampler on an Explicit mesh (its issue 932).

Its second kernel closes over the inverse mass matrix of the first, an array on
the mesh. Needs BlackJAX 1.7.1; ci/run_clients.sh installs it and runs this.
"""
import os
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '2')

from blackjax.adaptation.laps import laps
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

variances = jnp.array([0.5, 1., 2., 4.])


def run(axis_type):
  mesh = jax.make_mesh((2,), ('chains',), axis_types=(axis_type,),
                       devices=jax.devices()[:2])
  info, _, _, state = laps(
      logdensity_fn=lambda x: -0.5 * jnp.sum(x**2 / variances),
      sample_init=lambda key: 2 * jax.random.normal(key, (4,)),
      ndims=4, num_steps1=50, num_steps2=300, num_chains=256, mesh=mesh,
      rng_key=jax.random.key(0))
  return info, state


explicit = run(AxisType.Explicit)
auto = run(AxisType.Auto)
jax.tree.map(np.testing.assert_array_equal, explicit, auto)

info, state = explicit
print('positions:  ', jax.typeof(state.position))
print('steps:      ', len(info['phase_1']['L']), '+', len(info['phase_2']['L']))
print('acceptance: ', info['phase_2']['acc_prob'][-1])
print('variances:  ', jnp.var(jnp.asarray(np.asarray(state.position)), axis=0))
print('The runs on the Explicit and on the Auto mesh are equal.')
