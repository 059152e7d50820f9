"""A custom training loop on tf.distribute, to compare with custom_training.py.

python docs/examples/custom_training_tf.py
"""

from __future__ import annotations

import sys

import numpy as np

try:
    import tensorflow as tf
except ImportError:
    print("custom_training_tf.py needs TensorFlow, which is not installed: pip install tensorflow")
    sys.exit()

REPLICAS, EPOCHS, BATCH, RATE = 4, 5, 64, 0.5
RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((256, 10)).astype(np.float32)
LABELS = (INPUTS @ RNG.standard_normal((10, 3))).argmax(axis=1)

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
strategy = tf.distribute.MirroredStrategy([f"CPU:{k}" for k in range(REPLICAS)])

with strategy.scope():
    weights = tf.Variable(tf.zeros((10, 3)))


def compute(inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return this part's share of the mean loss, and its gradient."""
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, inputs @ weights)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
    return loss, tape.gradient(loss, weights)


def train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    loss, gradient = compute(*batch)
    ctx = tf.distribute.get_replica_context()
    gradient = ctx.all_reduce(tf.distribute.ReduceOp.SUM, gradient)
    weights.assign_sub(RATE * gradient)
    return loss


@tf.function
def distributed_train_step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    losses = strategy.run(train_step, args=(batch,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


def main() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(EPOCHS):
        losses = [distributed_train_step(batch) for batch in distributed]
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    main()
