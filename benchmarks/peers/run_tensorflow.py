"""NeuMF the usual way in TensorFlow: Keras layers, Keras's Adam, one graph for the step.

Without XLA, which is several times slower than the plain graph on a CPU. bf16 is Keras's policy `mixed_bfloat16`.
"""

import keras
import tensorflow as tf
from arm import BETAS, DROPOUT, EPS, FACTORS, LAYERS, LEARNING_RATE, Arm, Job, on_pairs, serve
from keras import layers


class KerasNeuMF(keras.Model):
    """NeuMF on pairs: users [R] and items [R] give logits [R]."""

    def __init__(self, n_users: int, n_items: int) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = embedding(n_users, FACTORS), embedding(n_items, FACTORS)
        self.mlp_user, self.mlp_item = embedding(n_users, LAYERS[0] // 2), embedding(n_items, LAYERS[0] // 2)
        self.hidden = [layers.Dense(width, "relu") for width in LAYERS[1:]]
        self.dropout = [layers.Dropout(DROPOUT) for _ in LAYERS[1:]]
        self.score = layers.Dense(1, kernel_initializer="lecun_uniform")

    def call(self, users: tf.Tensor, items: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Logits [R], in fp32."""
        gmf = self.gmf_user(users) * self.gmf_item(items)
        mlp = tf.concat([self.mlp_user(users), self.mlp_item(items)], -1)
        for dense, dropout in zip(self.hidden, self.dropout, strict=True):
            mlp = dropout(dense(mlp), training=training)
        return tf.cast(tf.squeeze(self.score(tf.concat([gmf, mlp], -1)), -1), tf.float32)


def embedding(rows: int, width: int) -> layers.Embedding:
    """A table drawn from N(0, 0.01)."""
    return layers.Embedding(rows, width, embeddings_initializer=keras.initializers.RandomNormal(stddev=0.01))


def build(job: Job) -> Arm:
    """Forward, backward and Adam in one `tf.function`."""
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy({"fp32": "float32", "bf16": "mixed_bfloat16"}[job.precision])
    model = KerasNeuMF(job.users, job.items)
    optimizer = keras.optimizers.Adam(LEARNING_RATE, *BETAS, epsilon=EPS)

    @tf.function
    def step(users: tf.Tensor, items: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(users, items, training=True)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits))
        weights = model.trainable_variables
        # Keras's Adam updates every row either way; with a dense gradient it does so a little faster.
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, weights)]
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return on_pairs(job, tf.constant, step)


if __name__ == "__main__":
    serve(build, lambda: f"tensorflow {tf.__version__}, keras {keras.__version__}")
