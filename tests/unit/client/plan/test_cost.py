"""The arithmetic of `vecd plan`, by figures that were computed by hand; its flags; and its words."""

import pytest

from vecd.client.plan import report
from vecd.client.plan.cost import Work, cost_of
from vecd.client.plan.measure import Measurement
from vecd.client.plan.options import parse_options, read_documents, read_duration

TEN_HOURS_S = 36_000.0


def work(dimensions: int = 384, dtype: str = "float32", num_documents: int = 10**10) -> Work:
    return Work(num_documents=num_documents, num_tokens=128, document_bytes=600.0, dimensions=dimensions, dtype=dtype)


def measured(documents_per_s: float = 20_000.0, *, is_cut: bool = False) -> Measurement:
    return Measurement(
        documents_per_s=documents_per_s, tokens_per_s=128 * documents_per_s, document_tokens=128.0,
        bytes_per_token=600 / 128, is_cut=is_cut, dimensions=384, model="a-model", seconds=20.0, in_flight=4096,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("documents_per_s", "dimensions", "dtype", "node_hours", "num_nodes", "write_mb_per_s"),
    [
        (450, 384, "float32", 6173, 618, 427),
        (1_634, 384, "float16", 1700, 170, 213),
        (20_000, 384, "int8", 139, 14, 107),
        (4_000, 1024, "float32", 694, 70, 1147),
        (4_000, 1024, "float16", 694, 70, 573),
        (4_000, 1024, "int8", 694, 70, 287),
    ],
)
def test_ten_billion_documents_in_ten_hours(documents_per_s, dimensions, dtype, node_hours, num_nodes, write_mb_per_s):
    cost = cost_of(work(dimensions, dtype), documents_per_s, deadline_s=TEN_HOURS_S)
    assert round(cost.node_hours) == node_hours
    assert cost.num_nodes == num_nodes
    assert cost.hours <= 10
    assert cost.write_bytes_per_s / 1e6 == pytest.approx(write_mb_per_s, rel=0.01)
    assert cost.read_bytes_per_s / 1e6 == pytest.approx(167, rel=0.02)
    assert cost.text_bytes == 6e12


def test_output_and_shards():
    cost = cost_of(work(), 20_000, deadline_s=TEN_HOURS_S)
    assert cost.output_bytes == 10**10 * 384 * 4
    assert (cost.shard_documents, cost.num_shards) == (12_000_000, 834)
    assert cost.shard_output_bytes == 12_000_000 * 1536
    assert cost_of(work(dtype="int8"), 20_000, deadline_s=TEN_HOURS_S).output_bytes == 10**10 * 384


def test_so_many_nodes_take_so_long():
    cost = cost_of(work(), 20_000, num_nodes=50)
    assert cost.num_nodes == 50
    assert cost.hours == pytest.approx(10**10 / 20_000 / 50 / 3600)
    assert cost.write_bytes_per_s == pytest.approx(50 * 20_000 * 1536)
    assert cost.node_hours == cost_of(work(), 20_000, deadline_s=1).node_hours


def test_little_work_is_one_shard_on_one_node():
    cost = cost_of(work(num_documents=5), 20_000, deadline_s=TEN_HOURS_S)
    assert (cost.num_nodes, cost.num_shards, cost.shard_documents) == (1, 1, 5)
    slow = cost_of(work(num_documents=5), 1e-4, deadline_s=TEN_HOURS_S)
    assert (slow.num_nodes, slow.num_shards, slow.shard_documents) == (2, 5, 1)


# --- flags ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"), [("1", 1), ("1e10", 10**10), ("2.5e9", 2_500_000_000), ("10_000", 10_000), ("1e15", 10**15)]
)
def test_numbers_of_documents(value, number):
    assert read_documents(value) == number


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e-3", "1e16", "inf", "nan", "", "many", "1e400"])
def test_what_is_no_number_of_documents(value):
    with pytest.raises(ValueError, match=r"is not a whole number of documents from 1 to 1e15, as 1e10"):
        read_documents(value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("10h", 36_000), ("1h30m", 5400), ("2d", 172_800), ("90s", 90), ("0.5h", 1800), ("1d2h", 93600)],
)
def test_deadlines(value, seconds):
    assert read_duration(value) == seconds


@pytest.mark.parametrize("value", ["", "10", "h", "0h", "0.1s", "-1h", "1h1d", "10 h", "9999d", "1w"])
def test_what_is_no_deadline(value):
    with pytest.raises(ValueError, match=r"is not a time from 1s to 3650d, as 10h or 1h30m"):
        read_duration(value)


GIVEN = ["--documents", "1e10", "--tokens", "128"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "128"], "--documents"),
        (["--documents", "1e10"], "--tokens"),
        ([*GIVEN[:2], "--tokens", "0"], "'0' is not a whole number from 1 to 32,768"),
        ([*GIVEN, "--deadline", "1h", "--nodes", "5"], "--deadline and --nodes exclude each other"),
        ([*GIVEN, "--nodes", "0"], "'0' is not a whole number"),
        ([*GIVEN, "--output-dtype", "float8"], "invalid choice: 'float8'"),
        ([*GIVEN, "--url", "127.0.0.1:8000"], "is neither http://host:port nor"),
        ([*GIVEN, "--url", "http://a", "--model", "b"], "--url names a running server"),
        ([*GIVEN, "--measure-s", "0"], "is not a number of seconds from 1 to 3,600"),
        ([*GIVEN, "--insecure"], "give --url https://host:port"),
        ([*GIVEN, "--", "--port", "1"], "where the server listens is chosen here"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_flags_and_their_defaults():
    options = parse_options([*GIVEN, "--", "--dtype", "float32"])
    assert (options.documents, options.tokens, options.deadline_s) == (10**10, 128, TEN_HOURS_S)
    assert (options.output_dtype, options.nodes, options.target) == ("float32", None, None)
    assert options.serve_flags == ("--dtype", "float32")


# --- words ----------------------------------------------------------------------------------------------------------


def test_the_report_for_people():
    said = report.text(work(), measured(), cost_of(work(), 20_000, deadline_s=TEN_HOURS_S))
    assert said.splitlines()[:10] == [
        "10,000,000,000 documents of 128 tokens, a-model, 384 dimensions",
        "",
        "this machine  20,000 documents/s, 2,560,000 tokens/s",
        "node-hours    139",
        "time          9.92 h with 14 nodes",
        "read          168 MB/s, 12 MB/s a node",
        "write         430 MB/s, 30.7 MB/s a node",
        "texts         6 TB",
        "output        15.4 TB, float32",
        "shards        834 of 12,000,000 documents, 18.4 GB each",
    ]
    assert "- A document has 600 bytes of UTF-8, 4.7 a token, as the English texts of the measurement." in said
    assert "The model reads" not in said


def test_the_report_says_what_the_model_leaves_out():
    long = Work(num_documents=1, num_tokens=512, document_bytes=1.0, dimensions=4, dtype="int8")
    said = report.text(long, measured(is_cut=True), cost_of(long, 20_000, num_nodes=1))
    assert "- The model reads 128 of the 512 tokens; the rest costs nothing." in said
    assert "with 1 node\n" in said


def test_the_report_for_programs():
    found = report.fields(work(), measured(), cost_of(work(), 20_000, num_nodes=50))
    assert (found["num_documents"], found["num_nodes"], found["model"]) == (10**10, 50, "a-model")
    assert found["measured"]["documents_per_s"] == 20_000
    assert len(found["assumptions"]) == 4
