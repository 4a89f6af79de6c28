from pathlib import Path

import pytest

from vecd.client.embed import outputs as shards
from vecd.client.embed.options import EmbedError, EmbedOptions, parse_options
from vecd.client.embed.outputs import list_shards, output_name, read_lines


def options_of(*argv: str, out: str = "/out") -> EmbedOptions:
    return parse_options([*argv, "--output-dir", out])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With data in two folders, and what is no data."""
    for name in ("a.txt", "b.jsonl.gz", "sub/a.txt", "sub/c.v2.csv", "_SUCCESS", ".hidden.txt", "notes.md", "_t/x.txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one\n")
    return tmp_path / "data"


def outputs(options: EmbedOptions) -> list[tuple[str, str]]:
    return [(source, out) for source, out in list_shards(options)]


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("a.b.jsonl.gz", (), "a.b.npy"),
        ("sub/a.PQ", ("--output-format", "parquet"), "sub/a.parquet"),
        ("a.log", ("--format", "txt"), "a.log.npy"),
        ("part-0.5", ("--format", "txt", "--output-format", "jsonl"), "part-0.5.jsonl"),
    ],
)
def test_outputs_are_named_by_their_inputs(name: str, flags: tuple[str, ...], expected: str) -> None:
    assert output_name(name, options_of("x", *flags)) == expected


def test_a_folder_keeps_its_folders_and_leaves_out_what_is_no_data(folder: Path) -> None:
    names = {"a.txt": "a", "b.jsonl.gz": "b", "sub/a.txt": "sub/a", "sub/c.v2.csv": "sub/c.v2"}
    assert outputs(options_of(str(folder))) == [(f"{folder}/{name}", f"/out/{out}.npy") for name, out in names.items()]


def test_a_glob_keeps_the_folders_behind_its_first_sign(folder: Path) -> None:
    named_twice = f"{folder}/../data/a.txt"
    found = outputs(options_of(f"{folder}/*/a.txt", f"{folder}/a.txt", f"{folder}/b*", named_twice))
    assert [out for _, out in found] == ["/out/a.npy", "/out/b.npy", "/out/sub/a.npy"]


def test_outputs_below_the_inputs_are_no_inputs(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "a.jsonl").write_text("{}\n")
    (folder / "a.npy.rejected.jsonl").write_text("{}\n")
    found = outputs(options_of(str(folder), "--output-format", "jsonl", out=str(folder / "out")))
    assert [Path(source).name for source, _ in found] == ["a.txt", "b.jsonl.gz", "a.txt", "c.v2.csv"]


def test_a_remote_folder_is_not_below_a_local_one_of_its_name(folder: Path) -> None:
    assert len(outputs(options_of(str(folder), out=f"s3:/{folder}/sub"))) == 4, "those in sub are inputs"


def test_two_inputs_with_one_output_are_both_named(folder: Path) -> None:
    with pytest.raises(EmbedError, match=f"{folder}/a.txt and {folder}/sub/a.txt have one output, /out/a.npy"):
        outputs(options_of(f"{folder}/a.txt", f"{folder}/sub/a.txt", "--shard", "1/2"))


@pytest.mark.parametrize("link", ["folder", "file", "hard"])
def test_no_output_replaces_an_input_through_a_link(folder: Path, link: str) -> None:
    out = folder.parent / "out"
    if link == "folder":
        out.symlink_to(folder)
    else:
        out.mkdir()
        (out / "c.jsonl").write_text("{}\n")
        ((folder / "c.jsonl").symlink_to if link == "file" else (folder / "c.jsonl").hardlink_to)(out / "c.jsonl")
    (folder / "c.jsonl").touch()
    flags = ("--output-format", "jsonl")
    with pytest.raises(EmbedError, match=r"data/c\.jsonl is input and output"):
        outputs(options_of(f"{folder}/c.jsonl", *flags, "--restart", out=str(out)))
    assert outputs(options_of(f"{folder}/c.jsonl", *flags, out=str(out))), "what is there is left alone"


def test_no_output_is_an_input_or_the_manifest(folder: Path) -> None:
    manifest = folder / "m.jsonl"
    manifest.write_text(f"{folder}/a.txt\tm.jsonl\n")
    flags = ("--output-format", "jsonl", "--manifest", str(manifest))
    with pytest.raises(EmbedError, match=r"m\.jsonl is input and output"):
        outputs(options_of(*flags, out=str(folder)))
    with pytest.raises(EmbedError, match=r"m\.jsonl is input and output"):
        outputs(options_of(str(manifest), *flags[:2], out=str(folder)))


@pytest.mark.parametrize(
    ("name", "format", "flags"),
    [
        ("data", "jsonl", ()),
        ("link", "parquet", ()),
        ("data/../data/", "jsonl", ()),
        ("data", "npy", ("--format", "txt")),
    ],
)
def test_outputs_that_the_next_run_would_read_are_refused_at_the_first(
    folder: Path, name: str, format: str, flags: tuple[str, ...]
) -> None:
    (folder.parent / "link").symlink_to(folder)
    with pytest.raises(EmbedError, match=f"would take .{format} outputs for inputs"):
        outputs(options_of(str(folder), "--output-format", format, *flags, out=f"{folder.parent}/{name}"))
    assert len(outputs(options_of(str(folder), out=str(folder)))) == 4, "vectors may lie beside their inputs"


def test_a_query_is_no_part_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://host/x/a.jsonl.gz?signature=a/b.c#d"
    monkeypatch.setattr(shards, "expand", lambda path: [(path, "")])
    assert outputs(options_of(url)) == [(url, "/out/a.npy")]
    assert list(read_lines([url.encode()], options_of("--manifest", "m"))) == [(url, "a.npy")]


def test_messages_about_names_have_no_secret(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text("sftp://me:hush@h/a.txt\nsftp://me:hush@h/b/a.txt\n")
    said = r"^sftp://me@h/a\.txt and sftp://me@h/b/a\.txt have one output, sftp://me@h/out/a"
    with pytest.raises(EmbedError, match=said):
        outputs(options_of("--manifest", str(manifest), out="sftp://me:hush@h/out"))


def test_shards_have_each_input_once(folder: Path) -> None:
    whole = outputs(options_of(str(folder)))
    parts = [outputs(options_of(str(folder), "--shard", f"{run}/3")) for run in range(3)]
    assert parts == [whole[0::3], whole[1::3], whole[2::3]]
    assert sorted(shard for part in parts for shard in part) == whole


def test_a_manifest_names_inputs_and_outputs() -> None:
    lines = [b"\xef\xbb\xbf# all of it", b"", b"/d/a.txt\r", b"s3://bucket/x/b.parquet\tone/b", b"/d/c.csv\tc.npy"]
    assert list(read_lines(lines, options_of("--manifest", "m"))) == [
        ("/d/a.txt", "a.npy"), ("s3://bucket/x/b.parquet", "one/b.npy"), ("/d/c.csv", "c.npy"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"\xff.txt", "not UTF-8"),
        (b"a.txt\tb\tc", "3 fields"),
        (b"a.txt\t", "'' is no name of an output"),
        (b"a.txt\t../x", "'../x' is no name of an output"),
        (b"a.txt\t/etc/x", "'/etc/x' is no name of an output"),
        (b"a\x00.txt", "a character that no path has"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: bytes, why: str) -> None:
    with pytest.raises(EmbedError, match=f"m, line 2: .*{why}"):
        list(read_lines([b"a.txt", line, b"b.txt"], options_of("--manifest", "m")))
