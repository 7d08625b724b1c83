"""Tables as text."""

from pydtnn.utils.tables import csv_of


def test_columns_are_those_given_and_then_those_of_the_rows_in_order():
    rows = [{"b": 1}, {"b": 'x, "y"', "a": None}]
    assert csv_of(rows, ["c", "a"]).splitlines() == ["c,a,b", ",,1", ',,"x, ""y"""']


def test_a_table_without_rows_is_the_names_of_its_first_columns():
    assert csv_of([], ["epoch"]) == "epoch\n"
