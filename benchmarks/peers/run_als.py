"""Implicit ALS from the `implicit` package: one step is a whole fit on random pairs, as many as there are interactions.

It has no loss to report; 0 stands for it.
"""

from typing import Any

import implicit
import numpy as np
from arm import FACTORS, Arm, Job, serve
from implicit.als import AlternatingLeastSquares
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

ITERATIONS, REGULARIZATION, ALPHA = 15, 0.05, 5.0


def build(job: Job) -> Arm:
    """Fits, each from new initial factors."""

    def load(number: int) -> csr_matrix:
        rng = np.random.default_rng(number)
        users = rng.integers(0, job.users, job.interactions, dtype=np.int32)
        items = rng.integers(0, job.items, job.interactions, dtype=np.int32)
        return csr_matrix((np.ones(job.interactions, np.float32), (users, items)), (job.users, job.items))

    def take(matrix: Any) -> float:
        with threadpool_limits(1, "blas"):  # as the package advises: it has a thread on each core already
            model = AlternatingLeastSquares(
                FACTORS,
                regularization=REGULARIZATION,
                alpha=ALPHA,
                iterations=ITERATIONS,
                use_gpu=False,
                random_state=0,
            )
            model.fit(matrix, show_progress=False)
        return 0.0

    return load, take


if __name__ == "__main__":
    serve(build, lambda: f"implicit {implicit.__version__}")
