"""What tenants ask, and whether an answer is theirs and right.

Owns the comparison with the reference, and the search for whose a wrong vector is. Opens no socket.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOLERANCE = 1e-5
"""Of each element, between an answer and the reference: float32 beside float32."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Tenant:
    """A caller: the texts (or lists of token ids) that nobody else sends, and the vectors that are right for them."""

    name: str
    texts: Sequence[str | list[int]]
    references: tuple[NDArray[np.float32], ...]
    """[N, D] for each model that may answer, in the order in which they are served."""
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A request and what its answer must be."""

    tenant: Tenant
    indices: tuple[int, ...]
    """Of the tenant's texts."""
    encoding: str
    request_id: str

    def render(self, headers: dict[str, str]) -> bytes:
        body = {"input": [self.tenant.texts[n] for n in self.indices], "encoding_format": self.encoding}
        content = json.dumps(body).encode()
        fields = {
            "host": "trial",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "x-request-id": self.request_id,
            **({"authorization": f"Bearer {self.tenant.key}"} if self.tenant.key else {}),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST /v1/embeddings HTTP/1.1\r\n{head}\r\n".encode() + content

    def vectors_of(self, answer: Answer) -> NDArray[np.float32]:
        """float32 [B, D]. Raises ValueError, KeyError, TypeError when it is not what was asked for."""
        if self.encoding == "bytes":
            return np.frombuffer(answer.body, dtype="<f4").reshape(len(self.indices), -1)
        items = json.loads(answer.body)["data"]
        if [item["index"] for item in items] != list(range(len(self.indices))):
            raise ValueError("items missing or out of order")
        if self.encoding == "float":
            return np.array([item["embedding"] for item in items], dtype=np.float32)
        return np.stack([np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in items])


def judge(question: Question, answer: Answer, tenants: Sequence[Tenant]) -> tuple[int, str]:
    """Which model's vectors an answer has, and what is wrong with it, if anything is."""
    try:
        vectors = question.vectors_of(answer)
    except (ValueError, KeyError, TypeError) as error:
        return -1, f"no vectors: {type(error).__name__} {error}"
    for model, reference in enumerate(question.tenant.references):
        expected = reference[list(question.indices)]
        if vectors.shape == expected.shape and np.abs(vectors - expected).max() <= TOLERANCE:
            return model, ""
    return -1, f"wrong vectors for {question.tenant.name} {question.indices}: {_whose(vectors, tenants)}"


def _whose(vectors: NDArray[np.float32], tenants: Sequence[Tenant]) -> str:
    """Row by row, whose vector it is."""
    names = []
    for row in vectors:
        name = "nobody's"
        for tenant in tenants:
            for model, reference in enumerate(tenant.references):
                if row.shape == reference.shape[1:]:
                    differences = np.abs(reference - row).max(axis=1)
                    if differences.min() <= TOLERANCE:
                        name = f"{tenant.name}[{differences.argmin()}] of model {model}"
        names.append(name)
    return ", ".join(names)
