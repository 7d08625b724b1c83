"""Files of a run with other values: a page, or one sentence."""

import json

import numpy as np

from pydtnn.tools.report.page import sections_of
from pydtnn.tools.report.runs import read_runs
from tests.each import each
from tests.fuzz.damage import change_json
from tests.tools.report.folders import write_run


@each("name", ["run.json", "history.json", "measurements.jsonl"])
def test_changed_values_give_sections_or_a_sentence(tmp_path, name):
    whole, changed = (write_run(tmp_path / key, ranks=ranks) for key, ranks in (("a", 1), ("b", 2)))
    text = (changed / name).read_bytes()
    read, sentences = 0, []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        if name == "measurements.jsonl":
            lines = [change_json(line, rng)[0] for line in text.splitlines()]
            (changed / name).write_bytes(b"\n".join(lines))
        else:
            (changed / name).write_bytes(change_json(text, rng)[0])
        try:
            runs = read_runs([whole, changed])
        except ValueError as error:
            sentences.append(str(error))
            continue
        read += 1
        for figure in (figure for section in sections_of(runs) for figure in section.figures):
            json.loads(figure.json())
    assert read > 5
    assert all(sentence.startswith("report: ") for sentence in sentences)
