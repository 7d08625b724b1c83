"""The planted errors of `tests.mutants` fit the library, and the runner tells which are found."""

from __future__ import annotations

import re

import pytest

from tests import mutants
from tests.mutants import MUTANTS, ROOT, Mutant, main


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_replaces_one_place_and_names_a_test(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.before) == 1
    assert mutant.after != mutant.before
    file, name, *_ = mutant.test.split("::")
    assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(), re.MULTILINE)


@pytest.mark.long  # runs of pytest
def test_the_runner_tells_killed_mutants_from_survivors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    units, test, kilo = "pydtnn/utils/units.py", "tests/utils/test_units.py", '"k": 1,'
    made = {
        "wrong": Mutant(units, kilo, '"k": 2,', test),
        "broken": Mutant(units, kilo, '"k" 1,', test),
        "harmless": Mutant(units, kilo, '"k": 1 + 0,', test),
        "no text": Mutant(units, '"k": 7,', '"k": 2,', test),
        "no test": Mutant(units, kilo, '"k": 2,', "tests/nothing.py"),
    }
    monkeypatch.setattr(mutants, "MUTANTS", made)
    assert main(["wrong"]) == 0
    assert main(["harmless", "wrong", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "SURVIVED" in printed
    assert "1 of 2 killed" in printed
    with pytest.raises(ValueError, match="expected a text that occurs once, got 0 of"):
        main(["no text"])
    with pytest.raises(ValueError, match=r"tests that pass without mutants, got(.|\n)*nothing\.py"):
        main(["no test"])
    with pytest.raises(ValueError, match=r"runs with the mutant, got(.|\n)*SyntaxError"):
        main(["broken"])
