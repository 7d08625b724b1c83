"""Published methods with which others are compared, and which few runs use.

The names are those of `--scheme` and `--compress`; registries find them here after their own.
"""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import Named, lazy

if TYPE_CHECKING:
    from pydtnn.tools.comparison.decoupled import DecoupledDiLoCo as DecoupledDiLoCo
    from pydtnn.tools.comparison.demo import demo as demo
    from pydtnn.tools.comparison.no_loco import NoLoCo as NoLoCo
    from pydtnn.tools.comparison.ok_topk import OkTopk as OkTopk
    from pydtnn.tools.comparison.ok_topk import ok_topk as ok_topk
    from pydtnn.tools.comparison.parameter_server import ParameterServer as ParameterServer
    from pydtnn.tools.comparison.push_sum import GradientPush as GradientPush
    from pydtnn.tools.comparison.stale_synchronous import StaleSynchronous as StaleSynchronous

METHODS = {
    "scheme": Named(
        __name__,
        {
            "decoupled_diloco": "DecoupledDiLoCo",
            "gradient_push": "GradientPush",
            "noloco": "NoLoCo",
            "parameter_server": "ParameterServer",
            "stale_synchronous": "StaleSynchronous",
        },
    ),
    "compressor": Named(__name__, {"demo": "demo", "ok_topk": "ok_topk"}),
}
"""Schemes and compressors by name, by the names of their registries."""

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
