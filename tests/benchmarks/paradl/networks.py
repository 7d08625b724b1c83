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


COSMOFLOW = """\
Dataset|CosmoFlow
Input|1584x4x512x512x512
Model|CosmoFlow
CONV_1|4x512x512x512|4x16x3x3x3|16x510x510x510|2.108143184
RELU|16x510x510x510|16x16x0x0x0|16x510x510x510|0
APOOL|16x510x510x510|0x0x2x2x2|16x255x255x255|0
CONV_2|16x255x255x255|16x32x3x3x3|32x253x253x253|0
RELU|32x253x253x253|32x32x0x0x0|32x253x253x253|0
APOOL|32x253x253x253|0x0x2x2x2|32x126x126x126|0
CONV_3|32x126x126x126|32x64x3x3x3|64x62x62x62|0
RELU|64x62x62x62|64x64x0x0x0|64x62x62x62|0
APOOL|64x62x62x62|0x0x2x2x2|64x31x31x31|0
CONV_4|64x31x31x31|64x128x3x3x3|128x29x29x29|0
RELU|128x29x29x29|128x128x0x0x0|128x29x29x29|0
APOOL|128x29x29x29|0x0x2x2x2|128x14x14x14|0
CONV_5|128x14x14x14|128x256x2x2x2|256x13x13x13|0
RELU|256x13x13x13|256x256x0x0x0|256x13x13x13|0
APOOL|256x13x13x13|0x0x2x2x2|256x6x6x6|0
CONV_6|256x6x6x6|256x256x2x2x2|256x5x5x5|0
RELU|256x5x5x5|256x256x0x0x0|256x5x5x5|0
APOOL|256x5x5x5|0x0x2x2x2|256x2x2x2|0
CONV_7|256x2x2x2|256x128x2x2x2|128x1x1x1|0
RELU|128x1x1x1|128x128x0x0x0|128x1x1x1|0
FC_1|128x1x1x1|128x2048x1x1x1|2048x1x1x1|0
RELU|2048x1x1x1|2048x2048x0x0x0|2048x1x1x1|0
FC_2|2048x1x1x1|2048x256x1x1x1|256x1x1x1|0
RELU|256x1x1x1|256x256x0x0x0|256x1x1x1|0
FC_3|256x1x1x1|256x4x1x1x1|4x1x1x1|0
"""


def cosmoflow256() -> str:
    """Return the published CosmoFlow for 256 values along each axis, with its slip of a digit."""
    lines = COSMOFLOW.replace("512x512x512", "256x256x256").splitlines()
    inside = iter(
        [
            *("256:256", "256:256", "256:128", "128:128", "128:128", "128:64", "64:64", "64:64"),
            *("64:32", "32:16", "16:16", "16:8", "8:8", "8:8", "8:4", "4:4", "4:4", "4:2"),
        ]
    )
    for number in range(3, 21):
        name, x, w, y, seconds = lines[number].split("|")
        before, _, after = next(inside).partition(":")
        x = "x".join([x.split("x")[0], *[before] * 3])
        y = "x".join([y.split("x")[0], *[after] * 3])
        if number == 7:
            x = "32x2128x128x128"
        lines[number] = "|".join([name, x, w, y, "0.263517898" if number == 3 else seconds])
    return "\n".join(lines)
