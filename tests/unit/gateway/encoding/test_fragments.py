import asyncio
import base64
from dataclasses import replace
from io import BytesIO
from itertools import product

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vecd.gateway.api.answer import render_rows
from vecd.gateway.encoding.forms import (
    Matrix,
    Names,
    check_forms,
    default_ranges,
    from_bfloat16,
    normalize,
    stored_dtype,
    to_bfloat16,
    to_binary,
    to_ubinary,
)
from vecd.gateway.encoding.result import Encoder, JsonRows, Result, encode_base64, encode_float, matrix_pieces
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import Dtype, Embedded, EmbedRequest, Encoding, Form, Make
from vecd.model.card import ModelCard
from vecd.model.steps import Step
from vecd.shm.output import Output

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=floats)

in_its_own_time = settings(max_examples=50)  # imports and a busy machine are no failure

_IMPOSSIBLE = {(Encoding.NPY, Dtype.BFLOAT16)}
FORMS = [Form(*form) for form in product(Encoding, Dtype, (False, True)) if form[:2] not in _IMPOSSIBLE]


def card_of(dim: int = 16, *, hidden_size: int | None = None, is_normalized: bool = True) -> ModelCard:
    return ModelCard(
        folder="/m", weights_folder="/m", model_type="bert", hidden_size=hidden_size or dim, dim=dim, max_tokens=8,
        vocab_size=9, pooling=("mean",), steps=(Step("normalize"),) * is_normalized, lowercase=False, prompt="",
    )  # fmt: skip


def request_of(num_inputs: int, *forms: Form, **fields) -> EmbedRequest:
    return EmbedRequest(inputs=["text"] * num_inputs, forms=forms, **fields)


def unit_rows(num_rows: int, dim: int) -> np.ndarray:
    return normalize(np.random.default_rng(num_rows * dim).standard_normal((num_rows, dim), dtype=np.float32))


def kept(make: Make) -> list[bytes]:
    return [bytes(row) for row in (make.rows if isinstance(make, Matrix) else make.made)]


def decoded(make: JsonRows | Matrix) -> np.ndarray:
    """What a caller has of it, in the machine's order; bfloat16 as float32."""
    form = make.form if isinstance(make, Matrix) else Form()
    if isinstance(make, Matrix):
        body = body_of(make)
        if form.encoding is Encoding.NPY:
            return np.load(BytesIO(body), allow_pickle=False)
        rows = np.frombuffer(body, stored_dtype(form)).reshape(len(make.rows), -1)
        return from_bfloat16(rows) if form.dtype is Dtype.BFLOAT16 else rows
    return np.array([orjson.loads(fragment) for fragment in make.made])


def decoded_base64(make: JsonRows | Matrix, form: Form) -> np.ndarray:
    assert isinstance(make, JsonRows)
    texts = [base64.b64decode(orjson.loads(fragment), validate=True) for fragment in make.made]
    rows = np.array([np.frombuffer(text, stored_dtype(form)) for text in texts])
    return from_bfloat16(rows) if form.dtype is Dtype.BFLOAT16 else rows


def collected(rows: np.ndarray, form: Form, card: ModelCard | None = None, **fields) -> JsonRows | Matrix:
    encoder = Encoder(card or card_of(rows.shape[1]))
    [make] = encoder.makes(request_of(len(rows), form, **fields), [])
    assert isinstance(make, JsonRows | Matrix)
    make.put(0, rows, 0)
    return make


def matrix_of(rows: np.ndarray, form: Form, card: ModelCard | None = None, **fields) -> Matrix:
    make = collected(rows, form, card, **fields)
    assert isinstance(make, Matrix)
    return make


def body_of(matrix: Matrix) -> bytes:
    body = render_rows(Embedded((matrix,), model="m", num_tokens=1)).body
    return body if isinstance(body, bytes) else b"".join(body)


# --- float32 ----------------------------------------------------------------------------------------------------


@in_its_own_time
@given(matrices)
def test_base64_is_the_floats_to_the_bit(rows):
    fragments = [base64.b64decode(orjson.loads(fragment), validate=True) for fragment in encode_base64(rows)]
    assert fragments == [row.astype("<f4").tobytes() for row in rows]


@in_its_own_time
@given(matrices)
def test_float_reads_back_as_the_same_float32(rows):
    read = [np.array(orjson.loads(fragment), dtype=np.float32).tobytes() for fragment in encode_float(rows)]
    assert read == [row.tobytes() for row in rows]


def test_float_is_the_shortest_form():
    assert encode_float(np.array([[0.1, 1.0]], dtype=np.float32)) == [b"[0.1,1.0]"]


# --- every form -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_rows_may_come_in_any_order_and_are_not_borrowed(form):
    rows = unit_rows(5, 16)
    in_order = collected(rows, form)
    [in_parts] = Encoder(card_of()).makes(request_of(5, form), [])
    for start, end in ((4, 5), (1, 4), (0, 1)):
        slot = rows[start:end].copy()
        in_parts.put(start, slot, 0)
        slot[:] = np.nan
    assert kept(in_parts) == kept(in_order)


_EXPECTED = {
    Dtype.FLOAT32: lambda rows: rows,
    Dtype.FLOAT16: lambda rows: rows.astype(np.float16),
    Dtype.BFLOAT16: lambda rows: from_bfloat16(to_bfloat16(rows)),
    Dtype.INT8: lambda rows: default_ranges(rows.shape[1]).to_int8(rows),
    Dtype.UINT8: lambda rows: default_ranges(rows.shape[1]).to_uint8(rows),
    Dtype.BINARY: to_binary,
    Dtype.UBINARY: to_ubinary,
}


@in_its_own_time
@given(st.integers(1, 5), st.integers(1, 6).map(lambda number: 8 * number), st.sampled_from(Dtype), st.booleans())
def test_every_encoding_says_the_same_numbers(num_rows, dim, dtype, is_big_endian):
    rows = unit_rows(num_rows, dim)
    as_numbers = decoded(collected(rows, Form(Encoding.FLOAT, dtype, is_big_endian)))
    in_base64 = Form(Encoding.BASE64, dtype, is_big_endian)
    others = [
        decoded_base64(collected(rows, in_base64), in_base64),
        decoded(collected(rows, Form(Encoding.BYTES, dtype, is_big_endian))),
    ]
    expected = _EXPECTED[dtype](rows)
    if dtype is not Dtype.BFLOAT16:
        others.append(decoded(collected(rows, Form(Encoding.NPY, dtype, is_big_endian))))
    for other in others:
        assert np.array_equal(other, expected)
    assert np.array_equal(as_numbers.astype(expected.dtype), expected)
    assert not np.issubdtype(expected.dtype, np.integer) or np.issubdtype(as_numbers.dtype, np.integer)


def test_numbers_of_a_float16_are_the_float32s_that_they_are():
    rows = np.array([[0.1] * 8], dtype=np.float32)
    [fragment] = kept(collected(rows, Form(dtype=Dtype.FLOAT16)))
    assert orjson.loads(fragment) == [float(str(np.float32(np.float16(0.1))))] * 8


def test_the_order_of_bytes_is_the_one_that_was_asked_for():
    rows = np.array([[1.0] + [0.0] * 7], dtype=np.float32)
    for dtype, little in ((Dtype.FLOAT32, "0000803f"), (Dtype.FLOAT16, "003c"), (Dtype.BFLOAT16, "803f")):
        width = len(little) // 2
        for is_big_endian in (False, True):
            ordered = bytes.fromhex(little)[:: -1 if is_big_endian else 1]
            matrix = matrix_of(rows, Form(Encoding.BYTES, dtype, is_big_endian))
            assert bytes(matrix.view()[:width]) == ordered
            [fragment] = kept(collected(rows, Form(Encoding.BASE64, dtype, is_big_endian)))
            assert base64.b64decode(orjson.loads(fragment))[:width] == ordered


def test_several_forms_are_answered_each_in_its_place():
    rows = unit_rows(3, 16)
    forms = [Form(dtype=dtype) for dtype in Dtype] + [Form(Encoding.BASE64), Form(Encoding.NPY, Dtype.FLOAT16)]
    makes = Encoder(card_of()).makes(request_of(3, *forms), [])
    for make in makes:
        make.put(0, rows, 0)
    assert [kept(make) for make in makes] == [kept(collected(rows, form)) for form in forms]


# --- length and dimensions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_fewer_dimensions_are_the_first_ones_brought_to_length_1(form):
    rows = unit_rows(3, 24)
    expected = collected(normalize(rows[:, :16].copy()), form, card_of(16))
    short = collected(rows, form, card_of(24), dimensions=16)
    assert kept(short) == kept(expected)
    if isinstance(short, Matrix):
        assert short.dim == 16
        assert short.row_bytes * 3 == len(short.view())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, lambda rows: rows[:, :16]),  # as sentence-transformers, which cuts after its last step
        ({"normalize": True}, lambda rows: normalize(rows[:, :16].copy())),
        ({"output": Output.UNNORMALIZED}, lambda rows: rows[:, :16]),
        ({"dimensions": 8}, lambda rows: rows[:, :8]),
    ],
)
def test_a_model_with_truncate_dim_is_cut_unless_the_request_says_otherwise(fields, expected):
    rows = unit_rows(3, 24)
    [make] = Encoder(replace(card_of(24), truncate_dim=16)).makes(request_of(3, Form(), **fields), [])
    make.put(0, rows, 0)
    assert [orjson.loads(row) for row in kept(make)] == pytest.approx(expected(rows), abs=1e-7)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize(
    ("is_normalized", "fields", "has_length_1"),
    [
        (True, {}, None),
        (True, {"output": Output.UNNORMALIZED}, False),
        (True, {"output": Output.UNNORMALIZED, "normalize": True}, True),
        (False, {}, False),
        (False, {"normalize": True}, True),
    ],
)
def test_length_1_is_made_where_it_is_asked_for_and_not_there(encoding, is_normalized, fields, has_length_1):
    rows = unit_rows(3, 16)
    if has_length_1 is not None:
        rows *= 7
    rows[1] = 0
    expected = normalize(rows) if has_length_1 else rows
    card = card_of(is_normalized=is_normalized)
    assert kept(collected(rows, Form(encoding), card, **fields)) == kept(collected(expected, Form(encoding)))
    # Fewer dimensions have length 1 again only if all had.
    first = collected(rows, Form(encoding), card, dimensions=8, **fields)
    short = rows[:, :8].copy() if has_length_1 is False else normalize(rows[:, :8])
    assert kept(first) == kept(collected(short, Form(encoding), card_of(8)))


# --- tokens -----------------------------------------------------------------------------------------------------

_TOKENS = {"output": Output.TOKENS, "normalize": True}


@in_its_own_time
@given(st.sampled_from(Dtype), st.booleans(), st.integers(1, 30))
def test_tokens_are_lists_of_lists_or_one_matrix_in_base64(dtype, is_big_endian, num_tokens):
    rows, model = unit_rows(num_tokens, 16), card_of(is_normalized=False)
    as_numbers = b"".join(matrix_pieces(rows, Form(dtype=dtype), [normalize]))
    in_base64 = b"".join(matrix_pieces(rows, Form(Encoding.BASE64, dtype, is_big_endian), [normalize]))
    one_by_one = kept(collected(rows, Form(dtype=dtype), model, normalize=True))
    assert orjson.loads(as_numbers) == [orjson.loads(fragment) for fragment in one_by_one]
    text = base64.b64decode(orjson.loads(in_base64), validate=True)
    assert text == body_of(matrix_of(rows, Form(Encoding.BYTES, dtype, is_big_endian), model, normalize=True))


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
def test_tokens_have_the_hidden_states_size_and_come_in_however_many_parts(cuts):
    rows = unit_rows(4, 8) * 5
    [make] = Encoder(card_of(16, hidden_size=8)).makes(request_of(1, Form(), output=Output.TOKENS), [])
    assert make.made[0].shape == (0, 8)
    for start, end in zip((0, *cuts), (*cuts, 4), strict=True):
        slot = rows[start:end].copy()
        make.put(0, slot, 4 - end)
        slot[:] = np.nan
    assert np.array_equal(make.made[0], rows)


# --- what cannot be ---------------------------------------------------------------------------------------------

INT8, UINT8 = Form(dtype=Dtype.INT8), Form(Encoding.BASE64, Dtype.UINT8)
BINARY = Form(dtype=Dtype.BINARY)


@pytest.mark.parametrize(
    ("card", "has_ranges", "request_", "param", "message"),
    [
        (card_of(), False, request_of(1, Form(Encoding.NPY, Dtype.BFLOAT16)), "e", "NumPy has no bfloat16"),
        (card_of(12), False, request_of(1, BINARY), "d", "a multiple of 8; there are 12"),
        (card_of(), False, request_of(1, BINARY, dimensions=9), "n", "'n': binary needs .* multiple of 8; there are 9"),
        (card_of(hidden_size=12), False, request_of(1, BINARY, **_TOKENS), "d", "there are 12"),
        (card_of(is_normalized=False), False, request_of(1, INT8), "d", "int8 is for vectors of length 1"),
        (card_of(), False, request_of(1, INT8, output=Output.TOKENS), "d", "int8 is for vectors of length 1"),
        (card_of(), True, request_of(1, INT8, dimensions=8), "n", "'n' is 8, but for int8 .* which have 16"),
        (card_of(), True, request_of(1, UINT8, output=Output.UNNORMALIZED), "d", "ranges of the model's own vectors"),
        (card_of(), True, request_of(1, INT8, **_TOKENS), "d", "ranges of the model's own vectors"),
        (card_of(is_normalized=False), True, request_of(1, INT8, normalize=True), "d", "the model's own vectors"),
        (card_of(), False, request_of(1, Form(Encoding.NPY), **_TOKENS), "e", "'float' or 'base64' .* is 'npy'"),
        (card_of(hidden_size=8), False, request_of(1, Form(), dimensions=9, **_TOKENS), "n", "1 to 8 .*, is 9"),
        (card_of(12), False, request_of(1, Form(), INT8, BINARY), "d", "a multiple of 8; there are 12"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_names_its_field(card, has_ranges, request_, param, message, tmp_path):
    with pytest.raises(BadRequest, match=message) as caught:
        check_forms(request_, card, Names("d", "e", "n"), has_ranges=has_ranges)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    # A dialect that forgets to ask gets no other vectors than were asked for.
    if request_.output is Output.TOKENS:
        return  # are kept as arrays
    with pytest.raises(BadRequest, match=r"must be|multiple|bfloat16|length 1|ranges"):
        Encoder(card, ranges_file(tmp_path, card.dim) if has_ranges else None).makes(request_, [])


def ranges_file(folder, dim: int) -> str:
    path = folder / "ranges.npy"
    np.save(path, np.array([[-0.25] * dim, [0.5] * dim], dtype=np.float32))
    return str(path)


@pytest.mark.parametrize(
    ("is_normalized", "fields"),
    [(True, {}), (True, {"normalize": True}), (False, {}), (False, {"output": Output.UNNORMALIZED})],
)
def test_a_file_of_ranges_is_used_for_the_models_own_vectors(tmp_path, is_normalized, fields):
    card = card_of(is_normalized=is_normalized)
    request = request_of(1, INT8, UINT8, **fields)
    check_forms(request, card, has_ranges=True)
    int8, uint8 = Encoder(card, ranges_file(tmp_path, 16)).makes(request, [])
    assert isinstance(uint8, JsonRows)
    row = np.zeros((1, 16), dtype=np.float32)
    row[0, :4] = [-0.25, 0.5, 0.125, -1]
    for make in (int8, uint8):
        make.put(0, row, 0)
    codes = np.array(orjson.loads(int8.made[0]))
    assert codes.tolist() == [-128, 127, -1, -128] + [-128 + 85] * 12
    assert np.array_equal(decoded_base64(uint8, UINT8)[0], codes + 128)


async def test_a_row_that_the_form_cannot_hold_fails_its_request_alone():
    card = card_of(is_normalized=False)
    makes = Encoder(card).makes(request_of(1, Form(dtype=Dtype.FLOAT16)), [])
    result = Result(1, makes, asyncio.get_running_loop())
    rows = np.full((1, 16), 1e5, dtype=np.float32)
    result.put_each(0, rows)
    with pytest.raises(BadRequest, match="float16 ends at 65504") as caught:
        result.finished.result()
    assert "100000" not in caught.value.message


# --- files and views --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "little", "big"),
    [
        (Dtype.FLOAT32, "<f4", ">f4"), (Dtype.FLOAT16, "<f2", ">f2"), (Dtype.INT8, "|i1", "|i1"),
        (Dtype.UINT8, "|u1", "|u1"), (Dtype.BINARY, "|i1", "|i1"), (Dtype.UBINARY, "|u1", "|u1"),
    ],
)  # fmt: skip
def test_a_numpy_file_has_the_type_that_was_asked_for(dtype, little, big):
    rows = unit_rows(2, 16)
    for is_big_endian, expected in ((False, little), (True, big)):
        matrix = matrix_of(rows, Form(Encoding.NPY, dtype, is_big_endian))
        array = np.load(BytesIO(body_of(matrix)), allow_pickle=False)
        assert array.dtype.str == expected
        assert np.array_equal(array, _EXPECTED[dtype](rows))
        assert render_rows(Embedded((matrix,), model="m", num_tokens=3)).headers == {
            "x-vecd-tokens": "3", "x-vecd-dimensions": "16", "x-vecd-dtype": dtype.value, "x-vecd-model": "m",
        }  # fmt: skip
