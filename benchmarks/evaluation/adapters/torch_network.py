"""The network of a job in PyTorch, with its weights."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function


class Residual(nn.Module):
    def __init__(self, body, shortcut):
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x):
        return self.body(x) + self.shortcut(x)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class Flatten(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)  # channels last, as in the other frameworks


def build(job):
    """Return the network with the weights of the job."""
    channels = job.x.shape[-1]
    weights = iter(map(torch.from_numpy, job.weights))

    def filled(layer, *values):
        for own, value in zip(layer.parameters(), values, strict=True):
            own.data.copy_(value)
        return layer

    def visit(given, shape):
        made = []
        for kind, *numbers in given:
            if kind == "conv":
                filters, kernel, stride = numbers
                layer = nn.Conv2d(shape[2], filters, kernel, stride, kernel // 2, bias=False)
                made.append(filled(layer, next(weights).permute(3, 2, 0, 1)))
                shape = (-(-shape[0] // stride), -(-shape[1] // stride), filters)
            elif kind == "bn":
                made.append(filled(nn.BatchNorm2d(shape[2]), next(weights), next(weights)))
            elif kind == "dense":
                made.append(filled(nn.Linear(shape[0], numbers[0]), next(weights).T, next(weights)))
                shape = (numbers[0],)
            elif kind == "maxpool":
                made.append(nn.MaxPool2d(numbers[0]))
                shape = (shape[0] // numbers[0], shape[1] // numbers[0], shape[2])
            elif kind == "gap":
                made.append(Mean())
                shape = shape[2:]
            elif kind == "flatten":
                made.append(Flatten())
                shape = (shape[0] * shape[1] * shape[2],)
            elif kind == "residual":
                body, after = visit(numbers[0], shape)
                made.append(Residual(body, visit(numbers[1], shape)[0]))
                shape = after
            else:
                made.append(nn.ReLU(inplace=True))
        return nn.Sequential(*made), shape

    return visit(job.layers, (*job.x.shape[1:3], channels))[0]


def step_of(job, model, wrap=lambda optimizer: optimizer):
    """Return a function that trains a step with SGD, which a framework may wrap."""
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=job.rate, momentum=job.momentum))

    def step(x, y):
        images, labels = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def predict_of(net):
    """Return a function that returns the outputs for samples."""

    def predict(x):
        with torch.no_grad():
            return net(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    return predict


@contextmanager
def trace(path):
    """Record steps with PyTorch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        yield lambda index: record_function("step")
    recorded.export_chrome_trace(str(path))
