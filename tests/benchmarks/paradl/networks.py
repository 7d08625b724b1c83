"""Networks of the published projections, in the format of the published tool."""

from __future__ import annotations

ALEXNET = """\
Dataset|ImageNet
Input|1280000x3x226x226
Model|AlexNet
CONV1|3x226x226|3x96x11x11|96x54x54|0.000610938
RELU|96x54x54|96x96x0x0|96x54x54|0
MPOOL|96x54x54|0x0x3x3|96x27x27|0
CONV2|96x27x27|96x256x5x5|256x27x27|0
RELU|256x27x27|256x256x0x0|256x27x27|0
MPOOL|256x27x27|0x0x3x3|256x13x13|0
CONV3|256x13x13|256x384x3x3|384x13x13|0
RELU|384x13x13|384x384x0x0|384x13x13|0
CONV4|384x13x13|384x384x3x3|384x13x13|0
RELU|384x13x13|384x384x0x0|384x13x13|0
CONV5|384x13x13|384x256x3x3|256x13x13|0
RELU|256x13x13|256x256x0x0|256x13x13|0
MPOOL|256x13x13|0x0x3x3|256x6x6|0
FC6|256x6x6|256x4096x6x6|4096x1x1|0
RELU|4096x1x1|4096x4096x0x0|4096x1x1|0
DROPOUT|4096x1x1|4096x4096x0x0|4096x1x1|0
FC7|4096x1x1|4096x4096x1x1|4096x1x1|0
RELU|4096x1x1|4096x4096x0x0|4096x1x1|0
DROPOUT|4096x1x1|4096x4096x0x0|4096x1x1|0
FC8|4096x1x1|4096x1000x1x1|1000x1x1|0
"""


def vgg16() -> str:
    """Return VGG-16 with images of 226 x 226, as in the published projections."""
    lines = ["Dataset|ImageNet", "# convolutions", "Input|1280000x3x226x226", "Model|VGG16"]
    sizes, channels = (226, 113, 57, 29, 15, 8), 3
    for block, (filters, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        size, after = sizes[block], sizes[block + 1]
        for number in range(count):
            seconds = 0.008245589 if len(lines) == 4 else 0
            shape = f"{filters}x{size}x{size}"
            lines.append(
                f"CONV{block + 1}_{number + 1}|{channels}x{size}x{size}|"
                f"{channels}x{filters}x3x3|{shape}|{seconds}"
            )
            lines.append(f"RELU|{shape}|{filters}x{filters}x0x0|{shape}|0")
            channels = filters
        lines.append(f"MPOOL|{shape}|0x0x2x2|{filters}x{after}x{after}|0")
    lines.append("FC6|512x8x8|512x4096x8x8|4096x1x1|0")
    for name, features in (("FC7", 4096), ("FC8", 1000)):
        lines += [f"{kind}|4096x1x1|4096x4096x0x0|4096x1x1|0" for kind in ("RELU", "DROPOUT")]
        lines.append(f"{name}|4096x1x1|4096x{features}x1x1|{features}x1x1|0")
    return "\n".join(lines)


def resnet50() -> str:
    """Return ResNet-50 with images of 226 x 226; shortcuts have no weights."""
    lines = ["Dataset|ImageNet", "Input|1280000x3x226x226", "Model|ResNet50"]

    def add(name: str, x: str, w: str, size: int, *after: str, seconds: float = 0) -> str:
        filters = w.split("x")[1]
        y = f"{filters}x{size}x{size}"
        lines.append(f"{name}|{x}|{w}|{y}|{seconds}")
        lines.extend(f"{kind}|{y}|{filters}x{filters}x0x0|{y}|0" for kind in after)
        return y

    first = add("CONV_1", "3x226x226", "3x64x7x7", 113, "BNORM", "RELU", seconds=0.003119502)
    x, channels, sizes = "64x56x56", 64, (56, 28, 14, 7)
    lines.append(f"MPOOL|{first}|0x0x3x3|{x}|0")
    for block, (size, count) in enumerate(zip(sizes, (3, 4, 6, 3), strict=True)):
        width = 64 << block
        for letter in "abcdef"[:count]:
            name = f"CONV_{block + 2}{letter}"
            x = add(f"{name}1", x, f"{channels}x{width}x1x1", size, "BNORM", "RELU")
            x = add(f"{name}2", x, f"{width}x{width}x3x3", size, "BNORM", "RELU")
            x = add(f"{name}3", x, f"{width}x{4 * width}x1x1", size, "BNORM", "ADD", "RELU")
            channels = 4 * width
    lines.append("APOOL|2048x7x7|0x0x7x7|2048x1x1|0")
    lines.append("FC6|2048x1x1|2048x1000x1x1|1000x1x1|0")
    return "\n".join(lines)


SIZES = {
    512: (512, 510, 255, 253, 126, 62, 31, 29, 14, 13, 6, 5, 2, 1),
    256: (256, 256, 128, 128, 64, 64, 32, 16, 8, 8, 4, 4, 2, 1),
}
"""Values along each axis before and after each convolution of CosmoFlow."""


def cosmoflow(size: int) -> str:
    """Return CosmoFlow; the published one for 256 values along each axis has a slip of a digit."""
    lines = ["Dataset|CosmoFlow", f"Input|1584x4{3 * f'x{size}'}", "Model|CosmoFlow"]
    filters, seconds = (4, 16, 32, 64, 128, 256, 256, 128), {512: 2.108143184, 256: 0.263517898}

    def maps(count: int, along: int) -> str:
        return f"{count}{3 * f'x{along}'}"

    for i in range(7):
        (before, after), y = SIZES[size][2 * i : 2 * i + 2], filters[i + 1]
        kernel = 3 * ("x3" if i < 4 else "x2")
        w, time = f"{filters[i]}x{y}{kernel}", 0 if i else seconds[size]
        lines.append(f"CONV_{i + 1}|{maps(filters[i], before)}|{w}|{maps(y, after)}|{time}")
        x = "32x2128x128x128" if (i, size) == (1, 256) else maps(y, after)
        lines.append(f"RELU|{x}|{y}x{y}x0x0x0|{maps(y, after)}|0")
        if i < 6:
            smaller = SIZES[size][2 * i + 2]
            lines.append(f"APOOL|{maps(y, after)}|0x0x2x2x2|{maps(y, smaller)}|0")
    for i, (one, other) in enumerate(((128, 2048), (2048, 256), (256, 4)), start=1):
        lines.append(f"FC_{i}|{maps(one, 1)}|{one}x{other}x1x1x1|{maps(other, 1)}|0")
        lines.append(f"RELU|{maps(other, 1)}|{other}x{other}x0x0x0|{maps(other, 1)}|0")
    return "\n".join(lines[:-1])
