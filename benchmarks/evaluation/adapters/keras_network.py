"""The network of a job in Keras, with its weights."""

import tensorflow as tf

layers = tf.keras.layers


def _build(given, x, weights):
    """Return the tensor after a list of layers, and append the layers that have weights."""
    for kind, *numbers in given:
        if kind == "conv":
            filters, kernel, stride = numbers
            x = layers.ZeroPadding2D(kernel // 2)(x) if kernel > 1 else x
            layer = layers.Conv2D(filters, kernel, stride, use_bias=False)
        elif kind == "bn":
            layer = layers.BatchNormalization(epsilon=1e-5)
        elif kind == "dense":
            layer = layers.Dense(numbers[0])
        elif kind == "maxpool":
            layer = layers.MaxPooling2D(numbers[0])
        elif kind == "residual":
            body = _build(numbers[0], x, weights)
            x = layers.Add()([body, _build(numbers[1], x, weights) if numbers[1] else x])
            continue
        else:
            kinds = {"gap": layers.GlobalAveragePooling2D, "flatten": layers.Flatten}
            layer = kinds.get(kind, layers.ReLU)()
        x = layer(x)
        if kind in ("conv", "bn", "dense"):
            weights.append(layer)
    return x


def build(job):
    """Return the network with the weights of the job."""
    with_weights: list = []
    image = tf.keras.Input(job.x.shape[1:])
    model = tf.keras.Model(image, _build(job.layers, image, with_weights))
    values = iter(job.weights)
    for layer in with_weights:
        for own in layer.trainable_variables:
            own.assign(next(values))
    return model


def sgd_of(job):
    """Return the optimizer of a job."""
    return tf.keras.optimizers.SGD(job.rate, momentum=job.momentum)


def losses_of(model, x, y):
    """Return the loss of each sample."""
    return tf.keras.losses.sparse_categorical_crossentropy(
        y, model(x, training=True), from_logits=True
    )
