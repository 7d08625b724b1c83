"""Data sets of packed documents and of computed sequences, the loss CTC, scores of sequences.

The names are those of `--dataset`, `--loss` and `--metrics`; registries find them here after their
own.
"""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import Named, lazy

if TYPE_CHECKING:
    from pydtnn.tools.sequences.computed import load_addition as load_addition
    from pydtnn.tools.sequences.computed import load_majority as load_majority
    from pydtnn.tools.sequences.computed import load_masked_text as load_masked_text
    from pydtnn.tools.sequences.computed import load_reversal as load_reversal
    from pydtnn.tools.sequences.ctc import CTC as CTC
    from pydtnn.tools.sequences.packed import PackedDataset as PackedDataset
    from pydtnn.tools.sequences.packed import load_documents as load_documents
    from pydtnn.tools.sequences.scores import BLEU as BLEU
    from pydtnn.tools.sequences.scores import ExactMatch as ExactMatch
    from pydtnn.tools.sequences.scores import bleu as bleu

METHODS = {
    "data set": Named(
        __name__,
        {
            "addition": "load_addition",
            "documents": "load_documents",
            "majority": "load_majority",
            "masked_text": "load_masked_text",
            "reversal": "load_reversal",
        },
    ),
    "loss": Named(__name__, {"ctc": "CTC"}),
    "metric": Named(__name__, {"bleu": "BLEU", "exact_match": "ExactMatch"}),
}
"""Data sets, losses and metrics by name, by the names of their registries."""

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
