"""The table of published measurements, and the predictions beside it."""

from __future__ import annotations

import re
from collections import Counter
from copy import copy
from dataclasses import replace

import pytest

from benchmarks.published import meshes, transformer
from benchmarks.published.__main__ import far_off, listed, main, summary
from benchmarks.published.images import layers_of
from benchmarks.published.predict import Compared, compare, fit, kernels_of, reason_of
from benchmarks.published.rows import FOLDER, all_rows, platform_of, read
from pydtnn.tools.perfmodel import Platform
from tests.each import each

ROWS = all_rows()


def row_of(source, name):
    return copy(next(row for row in ROWS if (row.source, row.row) == (source, name)))


def test_there_are_at_least_60_rows_from_10_sources_each_with_a_reference_and_an_address():
    assert len(ROWS) >= 60
    assert len({row.source for row in ROWS}) >= 10
    for row in ROWS:
        assert all([row.reference, row.place, row.address.startswith("https://")]), row
        assert min(row.measured, row.seconds) > 0, row
        assert row.data * row.tensor * row.pipeline == row.devices, row
        if row.layers:
            assert row.batch % (row.data * row.micro_batch) < row.data * row.micro_batch, row
    names = Counter((row.source, row.row) for row in ROWS)
    assert max(names.values()) == 1


def test_at_most_a_quarter_of_the_rows_of_a_device_is_fitted_and_two_of_the_ten_of_megatron():
    every, fitted = Counter(), Counter()
    for row in ROWS:
        device = kernels_of(row).device
        every[device] += 1
        fitted[device] += row.fitted
    assert all(4 * fitted[device] <= every[device] for device in every), (every, fitted)
    assert sum(row.fitted for row in ROWS if row.source == "narayanan2021") <= 2


def test_platforms_of_the_same_device_have_the_same_numbers():
    numbers = {}
    for row in ROWS:
        kernels = kernels_of(row)
        assert numbers.setdefault(kernels.device, kernels) == kernels


def test_every_platform_of_the_folder_is_used_and_loads():
    names = {path.stem for path in (FOLDER / "platforms").glob("*.yaml")}
    assert names <= {row.platform for row in ROWS}
    for name in names:
        assert platform_of(name).name == name


@each(
    ("source", "row", "seconds"),
    [
        ("korthikanti2023", "530B full", 49.05),
        ("pytorch_bert", "dgx-2 4 128", 256 / 704),
        # 8 l h^2 ... of section 3.4 of the paper: 96 B s l h^2 (1 + s / 6h + V / 16lh)
        (
            "narayanan2021",
            "145.6B",
            96
            * 2304
            * 2048
            * 80
            * 12288**2
            * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
            / (1536 * 148e12),
        ),
    ],
)
def test_a_measured_rate_is_a_time_of_a_step(source, row, seconds):
    assert row_of(source, row).seconds == pytest.approx(seconds, rel=1e-3)


@each(
    ("line", "message"),
    [
        ("a,x,1.5,no", "x.csv: a: .*invalid literal"),
        ("a,8,,no", "x.csv: a: measured is missing"),
        ("a,8,1.5,perhaps", "x.csv: a: 'perhaps'"),
    ],
)
def test_a_row_that_is_not_complete_is_refused_with_its_name(tmp_path, line, message):
    shared = ("reference", "place", "address", "software", "platform", "precision", "network")
    head = "".join(f"# {name}: x\n" for name in (*shared, "quantity"))
    file = tmp_path / "x.csv"
    file.write_text(f"{head}# batch: 8\nrow,devices,measured,fitted\n{line}\n")
    with pytest.raises(ValueError, match=message):
        list(read(file))


def test_the_schedule_takes_the_time_of_the_closed_formula_for_equal_stages():
    row = row_of("korthikanti2023", "175B selective")
    times = {stage: transformer.StageTime(1.0, 2.0) for stage in range(row.pipeline * row.chunks)}
    micro_batches = 64
    found = transformer.pipeline_seconds(row, times, micro_batches)
    expected = 3.0 * (row.chunks * micro_batches + row.pipeline - 1)
    assert found == pytest.approx(expected)


def test_a_block_with_more_recomputation_takes_longer_by_a_forward_at_most():
    row = row_of("korthikanti2023", "22B full")
    platform = platform_of(row.platform)
    device = transformer.Accelerator(platform, row.precision)
    messages = transformer.Messages(row, platform)
    times = {}
    for kind in ("none", "selective", "full"):
        row.recompute = kind
        times[kind] = transformer.block_times(row, device, messages)
    assert times["none"].backward < times["selective"].backward < times["full"].backward
    assert times["full"].backward - times["none"].backward == pytest.approx(times["none"].forward)


def test_the_printed_errors_are_those_of_the_predictions():
    some = [row for row in ROWS if row.source in ("paradl2021", "mlperf_v1_0", "pytorch_bert")]
    rows = [compare(row) for row in some]
    for line, one in zip([*listed(rows)][1:], rows, strict=True):
        printed = float(re.search(r"([+-][\d.]+) %", line)[1])
        assert printed == pytest.approx(100 * (one.predicted / one.row.seconds - 1), abs=0.06)
    held = [abs(one.error) for one in rows if not one.row.fitted]
    *_, every, _, _ = summary(rows, "source", lambda one: one.row.source)
    assert f"{100 * sum(held) / len(held):.1f} %" in every
    large = [one for one in rows if abs(one.error) > 0.15]
    assert next(far_off(rows)) == f"off by more than 15 %: {len(large)} of {len(rows)} rows"


def test_a_large_error_has_the_first_reason_that_fits():
    assert reason_of(row_of("maxtext", "16B 1x v5e-256")).startswith(
        "the numbers of another device"
    )
    assert reason_of(row_of("narayanan2021", "1.7B")) == "not known"


def test_rows_are_left_out_if_images_are_decoded_or_rows_that_should_be_as_slow_are_much_faster():
    contradicted = {row.row: row for row in ROWS if row.left_out.startswith("contradicted by")}
    assert len(contradicted) == 7
    assert not any(row.fitted for row in contradicted.values())
    assert contradicted["3.6B 8x8x1 64"].left_out.endswith(" 3.6B 8x8x1 32")  # 9.84 and 4.97 s
    assert "3.6B 16x4x1 32" not in contradicted  # tensor ranks of two hosts
    assert row_of("goyal2017", "8").left_out.startswith("images")


def test_heads_whose_rows_have_no_multiple_of_16_bytes_are_computed_without_tensor_cores():
    row = row_of("bloom2022", "182B 78x13824 128 heads 8x4x12 2 2048")
    slow = compare(row).predicted
    row.heads = 96  # of 144 columns instead of 108
    assert slow > 1.25 * compare(row).predicted


def test_a_bottleneck_of_version_1_has_its_stride_in_its_first_convolution():
    nets = (layers_of("resnet50", 224, version) for version in (0, 1))
    later, first = (sum(layer.cost(1).flops_forward for layer in net) for net in nets)
    assert first / later == pytest.approx(3.89 / 4.13, abs=0.002)


@pytest.mark.long
def test_the_fit_finds_numbers_with_which_rows_were_computed():
    row = row_of("tensorflow2017", "resnet50 64 1")
    kernels = kernels_of(row)
    row.measured = row.batch / Compared(row, compare(row).predicted).predicted
    found = fit([row])
    assert found == kernels  # exact already
    slower = replace(kernels, products=0.5 * kernels.products)
    row.measured = row.batch / compare(row, slower).predicted
    assert abs(compare(row, fit([row])).error) < 0.02


@pytest.mark.long
def test_the_ten_networks_of_megatron_are_predicted_within_8_percent_on_average():
    rows = [compare(row) for row in ROWS if row.source == "narayanan2021"]
    errors = [abs(one.error) for one in rows]
    assert len(errors) == 10
    assert sum(errors) / 10 < 0.08


@pytest.mark.long
def test_the_report_prints_means_of_fitted_and_held_out_rows_and_draws_them(tmp_path, capsys):
    main(["--figure", str(tmp_path / "figure.png"), "--rows", "mlperf_v1_0"])
    printed = capsys.readouterr().out
    pattern = r"^certain +\d+ +([\d.]+) % .* (\d+) +([\d.]+) % +([+-][\d.]+) %"
    *_, certain = re.findall(pattern, printed, re.M)
    assert int(certain[1]) > 300
    assert float(certain[2]) < 10.0
    assert abs(float(certain[3])) < 30.0
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_platform_without_kernels_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"platform laptop: expected compute.kernels; add it"):
        transformer.Accelerator(Platform.load("laptop"), "float32")


def test_the_meshes_of_authors_are_among_those_that_fit_and_none_is_faster_than_the_fastest():
    rows = [row for row in ROWS if row.source == "narayanan2021"][:6]
    for row in rows:
        own = [*meshes.meshes(row)]
        assert meshes.name(row) in map(meshes.name, own)
        regret, best, number = meshes.regret(row)
        assert number == len(own)
        assert (regret == 0) == (meshes.name(best) == meshes.name(row))
        assert 0 <= regret < 0.25
    assert meshes.memory(rows[0]) == pytest.approx(41e9, rel=0.02)
