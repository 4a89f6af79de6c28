"""Makes `gateway/data/cl100k_base.bin` of the table that tiktoken publishes: `python tools/make_cl100k.py TABLE`.

Owns the file's format, which `vecd.gateway.tokenization.cl100k` reads: zlib's compression of

    number of ids N   uint32, little-endian
    lengths           uint8 [N]; 0 where there is no such id
    tokens            their bytes, one after the other

TABLE is `cl100k_base.tiktoken`, which tiktoken fetches from openaipublic.blob.core.windows.net, and which the package
llama-index-core carries in its `_static/tiktoken_cache`. Needs the standard library alone.
"""

import base64
import hashlib
import sys
import zlib
from pathlib import Path

# Source: cl100k_base in tiktoken's tiktoken_ext/openai_public.py, for the digest and the special tokens.
TABLE_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
SPECIAL_TOKENS = {
    100257: b"<|endoftext|>",
    100258: b"<|fim_prefix|>",
    100259: b"<|fim_middle|>",
    100260: b"<|fim_suffix|>",
    100276: b"<|endofprompt|>",
}
TARGET = Path(__file__).resolve().parent.parent / "gateway" / "data" / "cl100k_base.bin"


def packed(table: bytes) -> bytes:
    """The file's content before it is compressed. `table`: lines of a token in base64 and its id."""
    tokens = {int(number): base64.b64decode(token) for token, number in map(bytes.split, table.splitlines())}
    tokens.update(SPECIAL_TOKENS)
    num_ids = max(tokens) + 1
    in_order = [tokens.get(token_id, b"") for token_id in range(num_ids)]
    return num_ids.to_bytes(4, "little") + bytes(map(len, in_order)) + b"".join(in_order)


def main(path: str) -> None:
    table = Path(path).read_bytes()
    if hashlib.sha256(table).hexdigest() != TABLE_SHA256:
        sys.exit(f"{path}: not the published table of cl100k_base")
    content = packed(table)
    TARGET.write_bytes(zlib.compress(content, 9))
    print(f"{TARGET}: {TARGET.stat().st_size} bytes; unpacked sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
