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
