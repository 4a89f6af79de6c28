"""Embed parquet files by Ray Data, with a checkpoint: run again, it goes on where it was killed (docs/ray.md).

    python ray_data.py --input s3://b/texts --output s3://b/vectors --checkpoint s3://b/done --num-nodes 4 \\
        -- --dtype float32

Input rows have a column of texts and one that tells rows apart; a null text gets a vector of NaN. Every node offers
{"vecd": 1}.
"""

import argparse

import ray

from vecd.client.ray.data import checkpoint_by, embed_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed parquet files with Ray Data.")
    parser.add_argument("--input", required=True, help="folder or URL of parquet files")
    parser.add_argument("--output", required=True, help="folder or URL of the parquet files that are written")
    parser.add_argument("--checkpoint", required=True, help="folder or URL of the ids that are done")
    parser.add_argument("--num-nodes", type=int, required=True, help="that compute, each with a vecd of its own")
    parser.add_argument("--id-column", default="id", help="tells rows apart (id)")
    parser.add_argument("--text-column", default="text", help="(text)")
    parser.add_argument("--model", help="folder or hub id (the bundled one)")
    parser.add_argument("--identity", help="that every node's vecd must have: x-vecd-identity of an earlier answer")
    parser.add_argument("flags", nargs="*", help="behind --: of vecd serve")
    options = parser.parse_args()
    ray.init()
    checkpoint_by(options.id_column, options.checkpoint)
    texts = ray.data.read_parquet(options.input, columns=[options.id_column, options.text_column])
    embedded = embed_dataset(
        texts,
        options.model,
        options.flags,
        num_nodes=options.num_nodes,
        text_column=options.text_column,
        identity=options.identity,
    )
    embedded.drop_columns([options.text_column]).write_parquet(options.output)


if __name__ == "__main__":
    main()
