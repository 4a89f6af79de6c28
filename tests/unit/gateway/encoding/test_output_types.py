"""docs/output-types.md: every snippet of it reads what the gateway writes."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from vecd.gateway.api.answer import render_rows
from vecd.gateway.encoding.forms import Matrix, normalize
from vecd.gateway.encoding.result import Encoder, matrix_pieces
from vecd.gateway.request import Dtype, Embedded, EmbedRequest, Encoding, Form
from vecd.model.card import ModelCard
from vecd.model.steps import Step
from vecd.shm.output import Output

_PAGE = (Path(__file__).parents[4] / "docs" / "output-types.md").read_text()
_SNIPPETS = dict(re.findall(r"^```python (.+?)\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL))
_DIM = 1536
_ROWS = normalize(np.random.default_rng(0).standard_normal((5, _DIM), dtype=np.float32))
_READING = [name for name in _SNIPPETS if name.split()[0] in {encoding.value for encoding in Encoding}]

# Of an element, which is some 1/40.
_TOLERANCES = {
    Dtype.FLOAT32: 0.0, Dtype.FLOAT16: 1e-4, Dtype.BFLOAT16: 6e-4, Dtype.INT8: 0.0033, Dtype.UINT8: 0.0033,
}  # fmt: skip


def test_there_is_a_snippet_for_each_dtype_and_encoding():
    words = {word for name in _READING for word in name.split()}
    assert words >= {member.value for enum in (Dtype, Encoding) for member in enum}


@pytest.mark.parametrize("name", _READING)
def test_what_a_snippet_reads_is_the_vector(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    encoding, dtype, *others = name.split()
    form = Form(Encoding(encoding), Dtype(dtype), "big-endian" in others)
    ranges_path = None
    if "ranges-file" in others:
        exec(_SNIPPETS["ranges-file"], {"np": np, "vectors": _ROWS})
        ranges_path = "ranges.npy"
    output = Output.TOKENS if "tokens" in others else Output.VECTORS
    card = ModelCard(
        "/m", "/m", "bert", _DIM, _DIM, 512, 99, ("mean",), (Step("normalize"),), lowercase=False, prompt=""
    )
    num_inputs = 1 if output is Output.TOKENS else len(_ROWS)
    request = EmbedRequest(["text"] * num_inputs, (form,), output=output)
    [make] = Encoder(card, ranges_path).makes(request, [])
    names = {"np": np, "io": io, "base64": base64, "dim": _DIM, "hidden_size": _DIM}
    make.put(0, _ROWS, 0)
    if isinstance(make, Matrix):
        pieces = render_rows(Embedded((make,), model="m", num_tokens=1)).body
        names["body"] = pieces if isinstance(pieces, bytes) else b"".join(pieces)
        expected = _ROWS
    else:
        of_tokens = output is Output.TOKENS
        names["embedding"] = orjson.loads(b"".join(matrix_pieces(_ROWS, form)) if of_tokens else make.made[0])
        expected = _ROWS if of_tokens else _ROWS[0]
    exec(_SNIPPETS[name], names)
    vectors = names["vectors"]
    assert isinstance(vectors, np.ndarray)
    assert (vectors.dtype, vectors.shape) == (np.float32, expected.shape)
    if form.dtype in _TOLERANCES:
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=_TOLERANCES[form.dtype])
    else:
        assert np.array_equal(vectors, np.where(expected > 0, 1, -1))


def test_whole_numbers_stay_what_they_are() -> None:
    """Of a model whose last step rounds: integers are the numbers themselves, signs those of what was not rounded."""
    card = ModelCard("/m", "/m", "qwen3", 8, 8, 512, 99, ("mean",), (Step("tanh_127"),), lowercase=False, prompt="")
    row = np.array([[126.6, -127.0, 0.4, -0.4, 3.5, 4.5, -60.2, 1.0]], dtype=np.float32)
    whole = [127, -127, 0, 0, 4, 4, -60, 1]

    def made(form: Form, **request: Any) -> np.ndarray:
        [make] = Encoder(card).makes(EmbedRequest(["text"], (form,), **request), [])
        make.put(0, row.copy(), 0)
        if isinstance(make, Matrix):
            return make.rows[0]
        return np.array(orjson.loads(make.made[0]))

    assert made(Form(Encoding.FLOAT, Dtype.FLOAT32)).tolist() == whole
    assert made(Form(Encoding.BYTES, Dtype.FLOAT32)).tolist() == whole
    assert made(Form(Encoding.FLOAT, Dtype.INT8)).tolist() == whole
    assert made(Form(Encoding.FLOAT, Dtype.INT8), dimensions=3).tolist() == whole[:3]
    assert made(Form(Encoding.FLOAT, Dtype.UINT8)).tolist() == [number + 128 for number in whole]
    assert made(Form(Encoding.FLOAT, Dtype.UBINARY)).tolist() == [0b10101101]
    of_length_1 = made(Form(Encoding.FLOAT, Dtype.FLOAT32), normalize=True)
    np.testing.assert_allclose(of_length_1, np.array(whole) / np.linalg.norm(whole), atol=1e-6)
