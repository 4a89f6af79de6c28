"""How well documents answer a query by the vectors of their tokens: late interaction, as in ColBERT.

For each vector of the query the greatest dot product with any vector of the document counts; the score is their sum, or
their mean. Computed in float32, as PyLate and sentence-transformers do. Pure. Called by dialects, in a thread where
there is much to compute.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def max_sim(query: NDArray[np.float32], document: NDArray[np.float32], *, is_mean: bool) -> float:
    """The score of one document [d, D] for a query [q, D]. 0 if either has no vectors, as a document of nothing but
    ignored tokens."""
    if not len(query) or not len(document):
        return 0.0
    greatest = (query @ document.T).max(axis=1)
    return float(greatest.mean() if is_mean else greatest.sum())


def max_sims(
    queries: Sequence[NDArray[np.float32]], documents: Sequence[NDArray[np.float32]], *, is_mean: bool
) -> NDArray[np.float64]:
    """The score of each document, for its own query or, where there is one, for that. Shape [N]."""
    of_all = queries[0] if len(queries) == 1 else None
    scores = [
        max_sim(queries[index] if of_all is None else of_all, document, is_mean=is_mean)
        for index, document in enumerate(documents)
    ]
    return np.array(scores, dtype=np.float64)
