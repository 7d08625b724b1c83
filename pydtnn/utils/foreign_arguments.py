"""Names of other libraries: arguments of classes; they apply to subclasses, too."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView

_BACKEND = "use Model(net, input_shape, backend='cuda')"
_DTYPE = "use Model(net, input_shape, dtype='bfloat16')"
_GIVEN = "the trainer passes the model's parameters to the optimizer"
_CHANNELS = "omit it: the number of input channels is known when the model is built"
_FEATURES = "omit it: the number of features is known when the model is built"
_SIZED = "the number of input channels is known when the model is built"
_REGULARIZER = "use weight_decay of the optimizer"
_FIT = "pass it to Trainer.fit"
_RANKS = "start the program with mpirun -np 4, or use exchange="
_PROBABILITIES = "omit it: predictions are logits"

_SCHEDULE = {
    "optimizer": "omit it: the optimizer takes the schedule, SGD(lr=Cosine(0.1, steps))",
    "learning_rate": "use lr=",
    "initial_learning_rate": "use lr=",
}

_CONVOLUTION = {
    "in_channels": _CHANNELS,
    "out_channels": "use filters=",
    "kernel": "use kernel_size=",
    "strides": "use stride=",
    "dilation_rate": "use dilation=",
    "padding_mode": "omit it: padding is zeros",
}

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Layer": {
        "input_shape": "use Model(net, input_shape)",
        "input_dim": "use Model(net, input_shape)",
        "batch_input_shape": "use Model(net, input_shape)",
        "dtype": "use Model(net, input_shape, dtype='float64')",
        "device": _BACKEND,
        "activation": "add a layer such as ReLU() after it",
        "inplace": "omit it: the model computes in place where it can",
        "dim": "omit it: channels are the last axis",
        "axis": "omit it: channels are the last axis",
        "data_format": "omit it: images are (H, W, C)",
        "kernel_regularizer": _REGULARIZER,
        "bias_regularizer": _REGULARIZER,
        "use_bias": "use bias=",
        "kernel_initializer": "use initializer=",
    },
    "Linear": {
        "units": "use features=",
        "out_features": "use features=",
        "output_dim": "use features=",
        "in_features": _CHANNELS,
    },
    "Conv2d": _CONVOLUTION,
    "Conv3d": _CONVOLUTION,
    "ConvTranspose2d": _CONVOLUTION,
    "Upsample": {
        "scale_factor": "use factor=",
        "size": "use factor=",
        "interpolation": "use mode=",
        "align_corners": "omit it: pixels are squares, not points",
    },
    "_Pool": {
        "pool_size": "use kernel_size=",
        "size": "use kernel_size=",
        "strides": "use stride=",
        "ceil_mode": "omit it, or use padding=",
    },
    "_AvgPool": {"count_include_pad": "use count_padding="},
    "AdaptiveAvgPool2d": {"size": "use output_size="},
    "GlobalAvgPool2d": {"keepdims": "use AdaptiveAvgPool2d(1) to keep the axes"},
    "BatchNorm": {
        "num_features": _CHANNELS,
        "eps": "use epsilon=",
        "affine": "omit it: gamma and beta are always learned",
        "track_running_stats": "omit it: running statistics are always tracked",
    },
    "GroupNorm": {
        "num_groups": "use groups=",
        "num_channels": _CHANNELS,
        "eps": "use epsilon=",
    },
    "LayerNorm": {
        "normalized_shape": "use axes=, which counts the last axes",
        "axis": "use axes=, which counts the last axes",
        "eps": "use epsilon=",
    },
    "Dropout": {"p": "use rate=", "seed": "omit it: Trainer.fit(train, seed=0) sets it"},
    "MultiHeadAttention": {
        "num_heads": "use heads=",
        "is_causal": "use causal=",
        "key_padding_mask": "pass the lengths of the samples as a second input",
        "embed_dim": _FEATURES,
        "key_dim": _FEATURES,
    },
    "LeakyReLU": {"negative_slope": "use alpha="},
    "Concat": {"dim": "use axis="},
    "Reshape": {"target_shape": "use shape="},
    "Optimizer": {
        "learning_rate": "use lr=",
        "params": f"omit it: {_GIVEN}",
        "parameters": f"omit it: {_GIVEN}",
        "eps": "use epsilon= of Adam and RMSProp",
        "betas": "use beta1= and beta2= of Adam",
        "beta_1": "use beta1= of Adam",
        "beta_2": "use beta2= of Adam",
        "decay": "use weight_decay=, or a schedule as lr=",
        "l2": "use weight_decay=",
        "clipnorm": "use clip_norm=",
        "global_clipnorm": "use clip_norm=",
        "clipvalue": "use clip_norm=",
        "max_grad_norm": "use clip_norm=",
        "amsgrad": "omit it: it is not implemented",
    },
    "RMSProp": {"alpha": "use rho="},
    "Step": {
        **_SCHEDULE,
        "step_size": "use boundaries=",
        "milestones": "use boundaries=",
        "decay_steps": "use boundaries=",
        "decay_rate": "use gamma=",
    },
    "Cosine": {
        **_SCHEDULE,
        "T_max": "use steps=",
        "decay_steps": "use steps=",
        "eta_min": "use final=",
    },
    "Polynomial": {
        **_SCHEDULE,
        "total_iters": "use steps=",
        "decay_steps": "use steps=",
        "end_learning_rate": "use final=",
    },
    "OneCycle": {
        **_SCHEDULE,
        "max_lr": "use lr=",
        "total_steps": "use steps=",
        "pct_start": "use rise=",
    },
    "Triangular": {**_SCHEDULE, "max_lr": "use lr=", "step_size_up": "use rise="},
    "WarmUp": {"optimizer": _SCHEDULE["optimizer"], "warmup_steps": "use steps="},
    "Model": {
        "inputs": "use Model(net, input_shape)",
        "outputs": "use Model(net, input_shape)",
        "device": "use backend=",
        "shape": "use input_shape=",
        "optimizer": "use Trainer(model, optimizer)",
        "loss": "use Trainer(model, optimizer, loss=...)",
        "metrics": "use Trainer(model, optimizer, metrics=[...])",
        "random_state": "use seed=",
        "precision": "use dtype=",
    },
    "Trainer": {
        "epochs": _FIT,
        "max_epochs": "pass epochs= to Trainer.fit",
        "batch_size": _FIT,
        "seed": _FIT,
        "lr": "pass it to the optimizer, SGD(lr=0.1)",
        "learning_rate": "pass it to the optimizer, SGD(lr=0.1)",
        "scheduler": "pass a schedule to the optimizer, SGD(lr=Cosine(0.1, steps))",
        "lr_scheduler": "pass a schedule to the optimizer, SGD(lr=Cosine(0.1, steps))",
        "criterion": "use loss=",
        "loss_fn": "use loss=",
        "metric": "use metrics=",
        "compute_metrics": "use metrics=",
        "callback": "use callbacks=",
        "accumulate_grad_batches": "use accumulation=",
        "gradient_accumulation_steps": "use accumulation=",
        "sync_batchnorm": "use sync_batch_norm=",
        "gradient_clip_val": "use clip_norm= of the optimizer",
        "precision": _DTYPE,
        "accelerator": _BACKEND,
        "device": _BACKEND,
        "devices": _RANKS,
        "gpus": _RANKS,
        "strategy": _RANKS,
        "comm": "use exchange=pydtnn.parallel.exchange.AllReduce(comm)",
        "communicator": "use exchange=pydtnn.parallel.exchange.AllReduce(comm)",
        "scheme": "use exchange=",
        "train_dataset": "pass the data sets to Trainer.fit",
        "train_loader": "pass the data sets to Trainer.fit",
    },
    "ArrayDataset": {
        "data": "use x=",
        "labels": "use y=",
        "targets": "use y=",
        "num_classes": "use classes=",
        "transform": "pass augment= to Trainer.fit",
        "batch_size": _FIT,
    },
    "Loader": {
        "batch_size": "use global_batch_size=",
        "num_workers": "use threads=",
        "drop_last": "use steps_per_epoch=",
    },
    "Monitor": {
        "metric": "use monitor=",
        "verbose": "omit it, or add ProgressBar()",
        "restore_best_weights": "add BestWeights(path)",
        "min_lr": "use min_factor= of ReduceOnPlateau",
        "threshold": "use min_delta=",
        "filepath": "use path= of BestWeights",
        "save_best_only": "omit it: only the best weights are saved",
    },
    "Checkpointer": {
        "filepath": "use directory=",
        "path": "use directory=",
        "save_freq": "use every_epochs= or every_steps=",
        "max_to_keep": "use keep=",
    },
    "Loss": {
        "reduction": "omit it: losses are sums that the trainer divides by the samples",
        "from_logits": _PROBABILITIES,
    },
    "Metric": {"top_k": "use k= of TopKAccuracy"},
}

POSITIONAL = {
    "Linear": "the size of the input is known when the model is built: use Linear(features)",
    "Conv2d": f"{_SIZED}: use Conv2d(filters, kernel_size)",
    "Conv3d": f"{_SIZED}: use Conv3d(filters, kernel_size)",
    "ConvTranspose2d": f"{_SIZED}: use ConvTranspose2d(filters, kernel_size)",
    "BatchNorm": "the number of channels is known when the model is built: use BatchNorm()",
    "GroupNorm": "the number of channels is known when the model is built: use GroupNorm(groups)",
    "LayerNorm": "the last axis is normalised: use LayerNorm(), or axes= for several",
    "MultiHeadAttention": (
        "the number of features is known when the model is built: use MultiHeadAttention(heads)"
    ),
    "Reshape": "use one tuple, Reshape((7, 7, 64))",
    "Optimizer": f"{_GIVEN}: use SGD(lr=0.1)",
    "Model": "use one layer or block, Model(Sequential(*layers), input_shape)",
    "Trainer": "use names for the others, Trainer(model, optimizer, loss='mse')",
}
"""What to do if there are too many arguments without names."""

REFUSED = {"Optimizer": (Mapping, ValuesView, ItemsView, list, tuple, Iterator)}
"""Types that the first argument cannot have."""
