"""Embeds texts on Spark: `mapInPandas`, with one vecd that all tasks of an executor share. See docs/bulk.md.

    spark-submit --conf spark.speculation=false --conf spark.executor.cores=2 deploy/bulk/spark.py \\
        s3a://bucket/texts s3a://bucket/vectors --format json --schema 'id string, text string' -- --dtype float32

The input files are embedded in groups, each into a folder of its own, and a group that is complete is skipped: if the
driver dies, the same command goes on with the group that was under way. What follows `--` are flags of `vecd serve`.
Each executor needs vecd, pandas and pyarrow; the driver needs vecd[fs] with the package of the store, for the listing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, FloatType, StructType

import vecd
from vecd.client.embed.storage import exists, expand, fetch, is_remote, join, shown, store


def embed_batches(
    batches: Iterator[pd.DataFrame], field: str, model: str | None, flags: list[str], identity: str | None
) -> Iterator[pd.DataFrame]:
    """One task: the batches with a column `embedding`, null where there is no text. Spark repeats a task that fails."""
    from vecd.client.local_server import local_server

    arguments = [*([model] if model else []), *flags]
    with local_server(arguments, shared=True) as (url, _), vecd.Client(url, identity=identity) as client:
        for batch in batches:
            texts = batch[field]
            has_text = texts.notna() & (texts.str.strip() != "")
            vectors: list[Any] = [None] * len(batch)
            if has_text.any():
                embedded = client.embed(texts[has_text].tolist(), priority="bulk")
                # One by one: with a mask, pandas makes of each vector a tuple of single numbers.
                for row, vector in zip(has_text.to_numpy().nonzero()[0], embedded, strict=True):
                    vectors[row] = vector
            yield batch.assign(embedding=pd.Series(vectors, index=batch.index, dtype=object))


def input_files(source: str, out: str) -> list[str]:
    """As they were at the first run: a file that comes later would move others to another group."""
    manifest = join(out, "_manifest.txt")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "manifest"
        if not exists(manifest):
            copy.write_text("".join(f"{found.path}\n" for found in expand(source)))
            store(copy, manifest)
        fetch(manifest, copy)
        return copy.read_text().splitlines()


def main() -> None:
    ours, flags = sys.argv[1:], list[str]()
    if "--" in ours:
        at = ours.index("--")
        ours, flags = ours[:at], ours[at + 1 :]
    parser = argparse.ArgumentParser(description="Embed texts on Spark; see the beginning of this file.")
    parser.add_argument("input", help="a file, a folder or a glob")
    parser.add_argument("output", help="a folder, for parquet files in a folder for each group")
    parser.add_argument("--format", default="parquet", help="json, csv, parquet, … (parquet)")
    # Required, because Spark would read all files once more to find it out, and each group might get another.
    parser.add_argument("--schema", required=True, help="the columns to read and keep: 'id string, text string'")
    parser.add_argument("--field", default="text", help="the column with the texts (text)")
    parser.add_argument("--model", help="as of vecd serve (the bundled one)")
    parser.add_argument("--identity", help="demanded of every server, as in /info: <hex>;dtype=float32")
    parser.add_argument("--files-per-group", type=int, default=1000, metavar="N", help="a few tasks per core (1000)")
    options = parser.parse_args(ours)

    # A second copy of a slow task would compute the same; and one vecd serves all cores of its executor already. The
    # tasks of an executor take turns in its vecd, so two of them keep it busy. In a batch of 10,000 rows, the default,
    # the first vector would wait for the last.
    spark = (
        SparkSession.builder.appName("vecd-embed")
        .config("spark.speculation", "false")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "2048")
        # Files appear when task and job have ended; version 2 of the algorithm would show them before.
        .config("spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version", "1")
        .getOrCreate()
    )
    columns = StructType.fromDDL(options.schema)
    schema = StructType([*columns.fields]).add("embedding", ArrayType(FloatType(), containsNull=False))
    embed: Any = partial(
        embed_batches, field=options.field, model=options.model, flags=flags, identity=options.identity
    )
    out = options.output if is_remote(options.output) else Path(options.output).absolute().as_uri()
    source = options.input if is_remote(options.input) else Path(options.input).absolute().as_uri()
    files = input_files(source, out)
    for number, start in enumerate(range(0, len(files), options.files_per_group)):
        target = join(out, f"group={number:06}")
        if exists(join(target, "_SUCCESS")):
            continue
        rows = spark.read.format(options.format).schema(columns).load(files[start : start + options.files_per_group])
        rows.mapInPandas(embed, schema).write.mode("overwrite").parquet(target)
        print(f"{shown(target)}: complete", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
