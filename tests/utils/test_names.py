from pydtnn.utils.names import unknown
from tests.each import each


@each(
    ("name", "sentence"),
    [
        ("cosin", "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ("COSINE", "unknown schedule 'COSINE'; did you mean 'cosine'?"),
        ("warm", "unknown schedule 'warm'; did you mean 'Warmup'?"),
        ("quadratic", "unknown schedule 'quadratic'; choose one of 'Warmup', 'cosine', 'step'"),
        ("xyz", "unknown schedule 'xyz'; choose one of 'Warmup', 'cosine', 'step'"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest_ones_or_all(name, sentence):
    assert unknown("schedule", name, ["cosine", "step", "Warmup"]) == sentence


@each(
    ("kind", "name", "choices", "rest"),
    [
        ("value of --device", "gpu", ["cpu", "cuda", "numpy"], "; use 'cuda'"),
        ("value of --dtype", "fp16", ["float32", "float16"], "; use 'float16'"),
        ("schedule", "cosine_decay", ["constant", "cosine"], "; did you mean 'cosine'?"),
        ("option", "--wandb", ["--plan", "--save"], "; choose one of '--plan', '--save'"),
        ("option", "--batch-size-of-rank", ["--plan", "--batch-size"], "; did you mean '--batch-s"),
        ("scheme", "FSDP", ["sharded", "sharded_parameters"], "; use 'sharded_parameters'"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(kind, name, choices, rest):
    assert unknown(kind, name, choices).startswith(f"unknown {kind} {name!r}{rest}")


def test_where_there_is_nothing_to_choose_the_sentence_says_so():
    assert unknown("option", "x", []) == "unknown option 'x'; there is none to choose from"
